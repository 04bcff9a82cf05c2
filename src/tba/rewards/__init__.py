"""Scores for completions: users' functions, the scoring boundary, timed scoring."""
