"""The Model Context Protocol over the host: an agent of a space as tools and resources of a coding agent.

The server is an agent at the host (`HostAgent`) and speaks to nobody else; it holds no connection to a broker. The
SDK (`mcp`) is imported here and nowhere else.
"""
