"""The demonstration: `tidings demo` starts a space, tells a story that fails if a promise does, and leaves nothing.

`command.py` starts and stops the space, `story.py` has the scenes, `away.py` the one that needs durable delivery,
`agent.py` is an agent as a process of its own; `links.py` is the story of two spaces. Nothing imports this package; the
command line names it.
"""
