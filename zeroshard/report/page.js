// Draws the charts of the report. The data is JSON in #data, made by figures.py; every word of it is shown as text.
"use strict";

(() => {
  const COLOURS = {
    // kinds of memory
    parameters: "#0072b2", gradients: "#e69f00", accumulators: "#d55e00", optimizer_states: "#009e73",
    gathered: "#56b4e9", buffers: "#999999", checkpoints: "#cc79a7", activations: "#cc79a7", temporary: "#f0e442",
    rest: "#b9bec6", states: "#56b4e9", all: "#8a94a0",
    // parts of a step
    forward: "#56b4e9", loss: "#f0e442", backward: "#0072b2", norm: "#b9bec6", update: "#009e73",
    "wait: gather": "#e69f00", "wait: reduce": "#d55e00", "wait: to the host": "#cc79a7",
    "wait: host update": "#009e73", "wait: to the device": "#8c6bb1", "wait: other": "#999999",
    // volume
    all_gather: "#e69f00", reduce_scatter: "#d55e00", all_reduce: "#cc79a7", formula: "#999999", planned: "#b9bec6",
  };
  const LANES = ["#0072b2", "#e69f00", "#d55e00", "#cc79a7", "#009e73", "#8c6bb1"];
  const RUNS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442", "#999999"];
  const DASHES = ["solid", [9, 4], [2, 3], [9, 4, 2, 4], [14, 4], [5, 5], [1, 4], [12, 3, 3, 3]];
  const SYMBOLS = ["circle", "rect", "triangle", "diamond", "roundRect", "pin", "arrow", "circle"];
  const HATCH = { symbol: "rect", dashArrayX: [1, 0], dashArrayY: [3, 4], rotation: -Math.PI / 4, color: "rgba(255,255,255,0.75)" };

  // The same hatching for boxes that a chart draws itself: a tile that is repeated.
  function hatched(colour) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const pen = tile.getContext("2d");
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 8, 8);
    pen.strokeStyle = "rgba(255,255,255,0.75)";
    pen.lineWidth = 2.2;
    for (const shift of [-8, 0, 8]) {
      pen.beginPath();
      pen.moveTo(shift - 1, 9);
      pen.lineTo(shift + 9, -1);
      pen.stroke();
    }
    return { image: tile, repeat: "repeat" };
  }

  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const spoken = document.getElementById("spoken");
  const drawn = new Map();

  // -- words ----------------------------------------------------------------------------------------------------

  const escaped = (text) =>
    String(text).replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);

  function digits(value) {
    if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en-US");
    if (value !== 0 && Math.abs(value) < 1e-3) return Number(value.toPrecision(4)).toExponential();
    return String(Number(value.toPrecision(4)));
  }

  function scaled(value, units) {
    for (const [unit, name] of units) {
      if (Math.abs(value) >= 0.9995 * unit) return `${Number((value / unit).toPrecision(3))} ${name}`;
    }
    const [unit, name] = units[units.length - 1];
    return value === 0 ? "0" : `${Number((value / unit).toPrecision(3))} ${name}`;
  }

  const WRITE = {
    bytes: (value) => scaled(value, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "KB"], [1, "B"]]),
    seconds: (value) => scaled(value, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]),
    "Ψ": (value) => `${digits(value)} Ψ`,
  };

  // -- looks ----------------------------------------------------------------------------------------------------

  const isDark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;

  function looks() {
    const style = getComputedStyle(root);
    const of = (name) => style.getPropertyValue(name).trim();
    return { text: of("--text"), quiet: of("--quiet"), line: of("--line"), card: of("--card"), ground: of("--ground") };
  }

  function common(look) {
    return {
      animation: false,
      textStyle: { fontFamily: getComputedStyle(document.body).fontFamily, color: look.text },
      tooltip: {
        confine: true, backgroundColor: look.card, borderColor: look.line, textStyle: { color: look.text, fontSize: 13 },
        extraCssText: "max-width:min(34rem,90vw);white-space:normal",
      },
      legend: {
        top: 0, left: 0, itemWidth: 16, itemHeight: 10, itemGap: 16, textStyle: { color: look.text, fontSize: 13 },
      },
    };
  }

  function axis(look, more) {
    return {
      axisLine: { show: false }, axisTick: { show: false }, axisLabel: { color: look.quiet, fontSize: 12, hideOverlap: true },
      splitLine: { lineStyle: { color: look.line } }, nameTextStyle: { color: look.quiet }, ...more,
    };
  }

  const pen = document.createElement("canvas").getContext("2d");
  function widthOf(text) {
    pen.font = `13px ${getComputedStyle(document.body).fontFamily}`;
    return Math.ceil(pen.measureText(text).width);
  }

  function shortened(text, room) {
    if (widthOf(text) <= room) return text;
    let length = text.length;
    while (length > 1 && widthOf(`${text.slice(0, length)}…`) > room) length -= 1;
    return `${text.slice(0, length)}…`;
  }

  // A label that is too long is two lines: the run, and what of it.
  const inRoom = (text, room) => (widthOf(text) <= room ? [text] : text.split(" · ")).map((part) => shortened(part, room)).join("\n");

  // The room that the longest of some labels takes, at most a part of the page.
  const roomFor = (labels, most) => Math.min(most, Math.max(...labels.map(widthOf)) + 4);

  // How high a legend is that goes on in a new line where one is full.
  function legendHeight(names, width) {
    let lines = 1;
    let used = 0;
    for (const name of names) {
      const needs = widthOf(name) + 44;
      if (used && used + needs > width) {
        lines += 1;
        used = 0;
      }
      used += needs;
    }
    return 12 + 22 * lines;
  }

  function row(colour, name, value) {
    const dot = `<span style="display:inline-block;width:.7em;height:.7em;border-radius:2px;background:${colour};margin-right:.5em"></span>`;
    return `<div style="display:flex;gap:1.5em;justify-content:space-between"><span>${dot}${escaped(name)}</span><b>${escaped(value)}</b></div>`;
  }

  // -- charts: each returns the option, and what the arrow keys step through --------------------------------------

  function lines(chart, look, width) {
    const several = chart.series.length > 1;
    const steps = new Set();
    for (const series of chart.series) for (const [step] of series.points) steps.add(step);
    const order = [...steps].sort((one, other) => one - other);
    const values = chart.series.map((series) => new Map(series.points));
    const option = {
      ...common(look),
      grid: { left: 8, right: 24, top: several ? legendHeight(chart.series.map(({ name }) => name), width) : 14, bottom: 24, containLabel: true },
      xAxis: axis(look, {
        type: "value", min: order[0], max: order[order.length - 1], name: chart.x, nameLocation: "middle", nameGap: 24,
        minInterval: 1, splitLine: { show: false }, axisLine: { show: true, lineStyle: { color: look.line } },
      }),
      yAxis: axis(look, { type: "value", scale: !chart.zero, axisLabel: { color: look.quiet, formatter: digits } }),
      series: chart.series.map((series) => ({
        type: "line", name: series.name, data: series.points, connectNulls: false,
        symbol: SYMBOLS[series.run], symbolSize: series.dashed ? 8 : 5,
        showSymbol: series.dashed || series.points.length < 40, color: RUNS[series.run],
        lineStyle: { color: RUNS[series.run], width: 2, type: series.dashed ? [4, 4] : DASHES[series.run] },
        itemStyle: series.dashed ? { color: look.ground, borderColor: RUNS[series.run], borderWidth: 2 } : {},
      })),
    };
    if (!several) option.legend.show = false;
    option.tooltip = {
      ...option.tooltip, trigger: "axis",
      axisPointer: { type: "line", lineStyle: { color: look.quiet } },
      formatter: (items) => `<b>step ${escaped(items[0].value[0].toLocaleString("en-US"))}</b>` + items.map(
        (item) => row(RUNS[chart.series[item.seriesIndex].run], item.seriesName, item.value[1] == null ? "not finite" : digits(item.value[1])),
      ).join(""),
    };
    const spokenAt = (at) => `step ${order[at]}: ` + chart.series.map((series, number) => {
      const value = values[number].get(order[at]);
      return value === undefined ? "" : `${series.name} ${value === null ? "not finite" : digits(value)}`;
    }).filter(Boolean).join(", ");
    const tipAt = (at) => {
      const series = values.findIndex((each) => each.has(order[at]));
      return { seriesIndex: series, dataIndex: chart.series[series].points.findIndex(([step]) => step === order[at]) };
    };
    return { option, count: order.length, spokenAt, tipAt };
  }

  function bars(chart, look, width) {
    const write = WRITE[chart.unit];
    const totals = chart.rows.map((_, at) => chart.series.reduce((sum, series) => sum + series.values[at], 0));
    const narrow = innerWidth < 600;
    const room = roomFor(chart.rows, width * (narrow ? 0.36 : 0.4));
    const top = legendHeight(chart.series.map(({ name }) => name), width);
    const option = {
      ...common(look),
      grid: { left: room + 12, right: 76, top, bottom: 24 },
      xAxis: axis(look, { type: "value", axisLabel: { color: look.quiet, formatter: write, hideOverlap: true }, splitNumber: narrow ? 3 : 6 }),
      yAxis: axis(look, {
        type: "category", inverse: true, data: chart.rows,
        axisLabel: { color: look.text, fontSize: 13, interval: 0, lineHeight: 15, formatter: (label) => inRoom(label, room) },
      }),
      series: chart.series.map((series, number) => ({
        type: "bar", stack: "all", name: series.name, data: series.values, barMaxWidth: 24, color: COLOURS[series.kind],
        itemStyle: series.hatched ? { decal: HATCH } : { borderColor: look.ground, borderWidth: 0.5 },
        label: number < chart.series.length - 1 ? { show: false } : {
          show: true, position: "right", color: look.text, fontSize: 12, formatter: (item) => write(totals[item.dataIndex]),
        },
      })),
    };
    option.tooltip = {
      ...option.tooltip, trigger: "axis", axisPointer: { type: "shadow", shadowStyle: { color: "rgba(128,128,128,0.12)" } },
      formatter: (items) => `<b>${escaped(chart.rows[items[0].dataIndex])}</b>` + items.filter((item) => item.value).map(
        (item) => row(COLOURS[chart.series[item.seriesIndex].kind], item.seriesName, write(item.value)),
      ).join("") + row("transparent", "total", write(totals[items[0].dataIndex])),
    };
    const spokenAt = (at) => `${chart.rows[at]}: ${write(totals[at])}. ` + chart.series
      .filter((series) => series.values[at]).map((series) => `${series.name} ${write(series.values[at])}`).join(", ");
    return { option, count: chart.rows.length, spokenAt, tipAt: (at) => ({ seriesIndex: 0, dataIndex: at }),
      height: top + 24 + chart.rows.length * (chart.rows.length > 20 ? 20 : 32) };
  }

  function lanes(chart, look) {
    const write = WRITE.seconds;
    const waiting = hatched("#d55e00");
    const box = (params, api, from, to, lane, share, fill) => {
      const [left, middle] = api.coord([from, lane]);
      const right = api.coord([to, lane])[0];
      const height = api.size([0, 1])[1] * share;
      const area = params.coordSys;
      const rectangle = echarts.graphic.clipRectByRect(
        { x: left, y: middle - height / 2, width: Math.max(right - left, 0.7), height },
        { x: area.x, y: area.y, width: area.width, height: area.height },
      );
      return rectangle && { type: "rect", shape: rectangle, style: { fill } };
    };
    const option = {
      ...common(look),
      grid: { left: roomFor(chart.lanes, 200) + 12, right: 16, top: 32, bottom: 58 },
      xAxis: axis(look, {
        type: "value", min: 0, max: chart.until, axisLabel: { color: look.quiet, formatter: write, hideOverlap: true, showMaxLabel: false },
      }),
      yAxis: axis(look, {
        type: "category", inverse: true, data: chart.lanes, splitLine: { show: true, lineStyle: { color: look.line } },
        axisLabel: { color: look.text, fontSize: 13 },
      }),
      dataZoom: [
        { type: "slider", height: 20, bottom: 8, labelFormatter: (value) => write(value), textStyle: { color: look.quiet }, brushSelect: false,
          borderColor: look.line, filterMode: "none", backgroundColor: look.card, showDataShadow: false },
        { type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, moveOnMouseMove: true, filterMode: "none" },
      ],
      series: [
        {
          type: "custom", name: "waits that nothing hides", color: "#d55e00", data: chart.waits, encode: { x: [0, 1] },
          itemStyle: { color: "#d55e00", decal: HATCH }, z: 3,
          renderItem: (params, api) => box(params, api, api.value(0), api.value(1), 0, 0.62, waiting),
        },
        {
          type: "custom", name: "work", color: LANES[0], data: chart.boxes, encode: { x: [1, 2], y: 0 }, z: 2,
          renderItem: (params, api) => box(params, api, api.value(1), api.value(2), api.value(0), 0.62, colourOf(chart.boxes[params.dataIndex])),
        },
        {
          type: "custom", name: "shade of waits", silent: true, data: chart.waits, encode: { x: [0, 1] }, z: 0,
          tooltip: { show: false },
          renderItem: (params, api) => {
            const area = params.coordSys;
            const left = Math.max(api.coord([api.value(0), 0])[0], area.x);
            const right = Math.min(api.coord([api.value(1), 0])[0], area.x + area.width);
            return right > left && { type: "rect", shape: { x: left, y: area.y, width: right - left, height: area.height }, style: { fill: "rgba(213,94,0,0.13)" } };
          },
        },
      ],
    };
    option.legend = { ...option.legend, data: ["waits that nothing hides"], selectedMode: false };
    const said = (isWait, each) => isWait
      ? [each[2], `${write(each[1] - each[0])}, from ${write(each[0])}`]
      : [`${chart.lanes[each[0]]}: ${each[3]}`, `${write(each[2] - each[1])}, from ${write(each[1])}`];
    option.tooltip = {
      ...option.tooltip, trigger: "item",
      formatter: (item) => {
        const [name, times] = said(item.seriesIndex === 0, item.value);
        return `<b>${escaped(name)}</b><br>${escaped(times)}`;
      },
    };
    const all = [...chart.waits.map((each, at) => [0, at, each, each[0]]), ...chart.boxes.map((each, at) => [1, at, each, each[1]])];
    all.sort((one, other) => one[3] - other[3]);
    return {
      option, count: all.length, spokenAt: (at) => said(all[at][0] === 0, all[at][2]).join(", "),
      tipAt: (at) => ({ seriesIndex: all[at][0], dataIndex: all[at][1] }), height: 100 + chart.lanes.length * 34,
    };
  }

  function colourOf([lane, , , name]) {
    if (lane > 0) return LANES[lane];
    return COLOURS[name.split(/[ ,]/, 1)[0]] || LANES[0];
  }

  const DRAW = { lines, bars, lanes };

  // -- the page -------------------------------------------------------------------------------------------------

  function draw(element) {
    const chart = data[element.dataset.chart];
    const { option, count, spokenAt, tipAt, height } = DRAW[chart.type](chart, looks(), element.clientWidth);
    if (height) element.style.height = `${height}px`;
    let instance = echarts.getInstanceByDom(element);
    if (instance) instance.resize();
    else instance = echarts.init(element, null, { renderer: "svg" });
    instance.setOption(option, true);
    drawn.set(element, { instance, count, spokenAt, tipAt, at: -1 });
  }

  function drawAll() {
    for (const element of document.querySelectorAll(".chart")) draw(element);
  }

  function onKey(event) {
    const known = drawn.get(event.currentTarget);
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (event.key === "Escape") {
      known.instance.dispatchAction({ type: "hideTip" });
      return;
    }
    if (event.key === "Home") known.at = 0;
    else if (event.key === "End") known.at = known.count - 1;
    else if (event.key in moves) known.at = Math.min(Math.max(known.at + moves[event.key], 0), known.count - 1);
    else return;
    event.preventDefault();
    known.instance.dispatchAction({ type: "showTip", ...known.tipAt(known.at) });
    spoken.textContent = known.spokenAt(known.at);
  }

  const button = document.getElementById("theme");
  function nameButton() {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Use ${isDark() ? "light" : "dark"} colours`);
    button.setAttribute("aria-pressed", String(isDark()));
  }
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    nameButton();
    drawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    nameButton();
    drawAll();
  });

  let before = null;
  addEventListener("beforeprint", () => {
    before = root.dataset.theme ?? "";
    root.dataset.theme = "light";
    drawAll();
  });
  addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before;
    else delete root.dataset.theme;
    drawAll();
  });

  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 80);
  });

  nameButton();
  for (const element of document.querySelectorAll(".chart")) {
    element.addEventListener("keydown", onKey);
    draw(element);
  }
})();
