"""Scores for completions: functions, reward models, endpoints, the boundary, timed scoring."""
