"""Measures this machine, for a profile that the plan then uses.

It runs the library itself, so it stands above the api. Its door is ``measure.calibrate``.
"""
