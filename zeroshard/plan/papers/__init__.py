"""The two papers: their formulas, and their claims beside ours.

The claims are computed with the papers' own formulas for memory (``devices``) and this plan's times. Doors:
``formulas`` for everybody who compares a run with the papers, ``table`` for ``plan --paper``.
"""
