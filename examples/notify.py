"""A script that says one thing and ends. Start a space first: `tidings up --open --detach`."""

import sys

import tidings

receipt = tidings.send("builds", " ".join(sys.argv[1:]) or "the build is green", name="ci")
print(receipt.id)
