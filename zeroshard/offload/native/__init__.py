"""The C++ sources of the host optimizer, and what compiles them."""
