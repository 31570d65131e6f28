"""All loops of the corpus, by name."""

from __future__ import annotations

from tests.loops.corpus import gradients, libraries, losses, structure, surroundings, weights

LOOPS = {
    loop.name: loop
    for theme in (gradients, weights, losses, structure, surroundings, libraries)
    for loop in theme.corpus.loops
}
