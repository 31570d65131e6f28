"""One HTML file that shows a run: loss, speed, memory, where the time of a step goes, and what would make it faster.

The report is a function from the folders of runs to a text. What it knows of a run is the journal, lines of JSON that
the recorder writes; it knows no model, and no file here imports torch. Nothing in the page is fetched from a network:
a policy in the page forbids it.

The charts are Apache ECharts 6.1.0, whose whole bundle is in ``library/`` with its licence, as published. Its 1.1 MB
are the price of one library that has lanes (a series that draws itself), stacked bars, SVG that prints well, and
hatching for people who do not tell colours apart. uPlot has 51 KB, and lines alone. Plotly's basic bundle is no smaller
(1.2 MB), and draws lanes only as bars with an offset. Vega-Lite needs three bundles (0.8 MB) and compiles expressions
with ``Function``, which the page's policy refuses.

Read ``journal`` first (what is recorded, and how it is read), then ``timeline`` (what a step waits for), ``summary``
(the numbers that page and advice share), ``advice`` (one function for each rule), ``figures`` (charts and tables as
data) and ``page`` (the text). ``page.js`` and ``page.css`` are what runs in the browser.
"""
