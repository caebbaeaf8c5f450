"""Every operation of Tidings, declared once: a typed request, a typed answer, and what a caller has to know.

`core.py` has the machinery and `catalogue.py` lists all operations; every other module declares some. Decoding, the
errors for invalid requests, dispatch, permissions, `control.schema.json`, the reference pages and the paths of the
host's API derive from the declarations. What an operation does is in its handler, in `steward/`, `host/` or `links/`.
"""
