"""The Model Context Protocol over the host: an agent of a space as tools and resources of a coding agent.

The server speaks to the host's daemon only (`desk.py`); it holds no connection to a broker and no key. The SDK (`mcp`)
is imported here and nowhere else.
"""
