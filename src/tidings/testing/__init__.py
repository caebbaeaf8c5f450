"""What Tidings is tested with, shipped so that you can test with it too.

A real space in a temporary directory (`real_space`), the security suite (`security`), generated logs and the naive
model they are judged by (`generated`, `model`).
"""
