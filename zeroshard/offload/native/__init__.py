"""The C++ sources of the host optimizer, and their build. Read update.h first: it is the pass over memory."""
