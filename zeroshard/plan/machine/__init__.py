"""The machines that a plan is for: profiles with their sources, and the hardware that a command line describes.

Profiles of this machine are measured by the room ``calibrate``, which runs the library and so is above this one. The
doors are ``profile.load`` and ``hardware.find_hardware``.
"""
