"""The C++ sources of the host optimizer, and their build.

Read update.h first: it is the pass over memory. With moments in 8 bits that pass is in tiles.h.
"""
