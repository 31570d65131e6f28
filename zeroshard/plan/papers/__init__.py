"""The two papers: their formulas, and their claims beside our numbers.

The claims are data (``claims.toml``). ``runs`` computes our numbers with the papers' own formulas for memory and this
plan's times. Doors: ``formulas`` for everybody who compares a run with the papers, ``table`` for ``plan --paper``.
"""
