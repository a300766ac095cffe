"""Launchers: a plan becomes arguments, a source and a launch."""
