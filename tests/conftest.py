"""Hypothesis profiles: `ci` repeats itself exactly, `deep` (TIDINGS_DEEP=1) searches further."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, max_examples=50, deadline=None)
settings.register_profile("deep", max_examples=1000, deadline=None)
settings.load_profile("deep" if os.environ.get("TIDINGS_DEEP") else "ci")
