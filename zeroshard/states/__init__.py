"""What a rank keeps of a model: units, their flats, and gradients.

This room knows what memory holds and who owns it, not when a step needs it. Read ``unit`` first, then ``flat`` and
``gradient``.
"""
