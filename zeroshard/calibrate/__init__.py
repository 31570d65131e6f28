"""Measures this machine and writes a machine profile, which the plan then predicts times with.

The room knows the whole library, because it times the library itself; so it stands above the api. No other room but the
command line may use it. Read ``measure`` first: it calls everything else. Its doors are ``measure.calibrate`` (measure)
and ``measure.write`` (store the profile).
"""
