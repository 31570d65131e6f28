"""When things happen: hooks on the model gather, reduce and release its units.

Read ``hooks`` first, then ``reducer``.
"""
