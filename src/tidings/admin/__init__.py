"""What an operator does with keys: homes, agents, invitations, links, moves. Opens the keys that mint credentials."""
