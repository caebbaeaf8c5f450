"""A space: where it lives on disk, who its agents are, what its log says, and how to ask its steward."""
