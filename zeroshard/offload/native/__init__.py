"""The C++ sources of the host optimizer, and their build. Read update.h first: it is the pass over memory. tiles.h is the one with 8-bit moments."""
