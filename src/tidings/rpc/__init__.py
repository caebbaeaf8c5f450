"""Carriers of control requests."""
