// Draws the charts of the page from the data in it. Each chart is a function from its box to an option of ECharts.
"use strict";
(() => {
  const run = JSON.parse(document.getElementById("data").textContent);
  const PARTS = ["input", "forward", "backward", "gather", "reduce", "optimizer", "checkpoint", "other"];
  const EXPOSED = { gather: "exposed gathers", reduce: "exposed reductions" };
  const STATES = ["parameters at rest", "optimizer state", "gradients that the optimizer sees", "unsharded parameters",
    "activations", "whole gradients", "messages", "temporaries"];
  const SPANS = { all_gather: "gather", reduce_scatter: "reduce", all_reduce: "reduce", wait: "wait" };
  const root = document.documentElement;

  // ---- words and numbers

  const escapes = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  const text = (value) => String(value).replace(/[&<>"']/g, (it) => escapes[it]);
  const unit = (fqn) => fqn || "the root";
  const digits = (value) => {
    const away = Math.abs(value);
    if (away && (away < 1e-3 || away >= 1e7)) return Number(value.toPrecision(2)).toExponential();
    return away >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  };
  const time = (s) => s == null ? "–" : s === 0 ? "0" : Math.abs(s) >= 0.9995 ? digits(s) + " s"
    : Math.abs(s) >= 0.9995e-3 ? digits(s * 1e3) + " ms" : digits(s * 1e6) + " µs";
  const size = (bytes) => {
    if (bytes == null) return "–";
    const power = Math.min(4, Math.max(0, Math.floor(Math.log10(Math.max(1, Math.abs(bytes) * 1.0005)) / 3)));
    return digits(bytes / 1000 ** power) + " " + ["B", "kB", "MB", "GB", "TB"][power];
  };
  const percent = (share) => (share > 0 && share < 0.005 ? "< 1" : (share * 100).toFixed(0)) + "\u00a0%";
  const short = (name, most) => name.length > most ? "…" + name.slice(1 - most) : name;
  // The end of a dotted name that fits: layers.10.mlp, then 10.mlp, then mlp, then nothing.
  const fitting = (name, most) => {
    while (name.length > most) {
      if (!name.includes(".")) return "";
      name = name.slice(name.indexOf(".") + 1);
    }
    return name;
  };

  // ---- colours and what all charts share

  const color = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const partColor = (part) => color(PARTS.includes(part) || part === "wait" ? part : "other");
  const stateColor = (state) => color("state-" + (STATES.indexOf(state) + STATES.length) % STATES.length);
  const rankColor = (rank, of) => echarts.color.lerp(of > 1 ? rank / (of - 1) : 0,
    [color("backward"), color("forward"), color("checkpoint"), color("state-4"), color("gather")]);
  const inkOn = (shade) => echarts.color.lum(shade, 1) > 0.6 ? "#14171b" : "#ffffff";
  const narrow = (box) => box.clientWidth < 560;
  const tip = (title, rows) => `<div class="tip"><b>${text(title)}</b>` + rows.map(([name, value, mark]) =>
    `<div><span>${mark ? `<i class="swatch" style="background:${mark}"></i>` : ""}${text(name)}</span><b>${text(value)}</b></div>`).join("") + "</div>";
  const axis = (more) => ({
    axisLine: { lineStyle: { color: color("line") } },
    axisTick: { show: false },
    axisLabel: { color: color("soft"), fontSize: 12, hideOverlap: true },
    nameTextStyle: { color: color("soft"), fontSize: 12 },
    splitLine: { lineStyle: { color: color("line") } },
    ...more,
  });
  const names = (data, more = {}) => axis({
    type: "category", data, splitLine: { show: false }, ...more,
    axisLabel: { color: color("text"), fontSize: 12, ...more.axisLabel },
  });
  const times = (more = {}) => axis({ type: "value", ...more, axisLabel: { color: color("soft"), fontSize: 12, hideOverlap: true, formatter: time, ...more.axisLabel } });
  const sizes = (more = {}) => times({ ...more, axisLabel: { formatter: size, ...more.axisLabel } });
  // Steps from left to right; values come as pairs.
  const steps = (at, more = {}) => axis({
    type: "value", min: at[0], max: Math.max(at[at.length - 1], at[0] + 1), minInterval: 1, splitLine: { show: false },
    name: "step", nameLocation: "middle", nameGap: 26, ...more,
    axisLabel: { color: color("soft"), fontSize: 12, hideOverlap: true, showMinLabel: true, showMaxLabel: false, ...more.axisLabel },
  });
  const whole = () => ({
    animation: false,
    textStyle: { fontFamily: getComputedStyle(document.body).fontFamily },
    tooltip: tooltip({}),
  });
  const tooltip = (more) => ({
    confine: true, backgroundColor: color("card"), borderColor: color("line"), borderWidth: 1, padding: [8, 12],
    textStyle: { color: color("text"), fontSize: 13 }, extraCssText: "box-shadow: 0 4px 16px rgb(0 0 0 / .18);", ...more,
  });
  const pointed = (formatter) => tooltip({ trigger: "axis", axisPointer: { type: "line", lineStyle: { color: color("soft") } }, formatter });
  const stepName = (at, each) => each > 1 ? `steps ${at} to ${at + each - 1}` : `step ${at}`;
  const pairs = (at, values) => values.map((it, place) => [at[place], it]);
  const line = (name, data, shade, more = {}) => ({
    name, type: "line", data, showSymbol: data.length < 3, symbolSize: 5, lineStyle: { width: 1.6, color: shade },
    itemStyle: { color: shade }, emphasis: { disabled: true }, ...more,
  });
  const labelled = (position, formatter) => ({ show: true, position, formatter, color: color("text"), fontSize: 12 });

  // ---- the step

  const charts = {};
  const LONGEST = "the longest step";
  const longest = (at, each, most) => each > 1 ? [line(LONGEST, pairs(at, most), color("text"), { symbol: "none", lineStyle: { width: 1, color: color("text") } })] : [];

  charts.waterfall = (box) => {
    const parts = run.step.parts.filter((it) => it.mean_s);
    const rows = [...parts.map((it) => EXPOSED[it.part] || it.part), "a step"];
    let before = 0;
    const starts = parts.map((it) => { const start = before; before += it.mean_s; return start; });
    const said = (it) => narrow(box) ? time(it.mean_s) : `${time(it.mean_s)}   ${percent(it.share)}`;
    return {
      says: parts.map((it, place) => `${rows[place]} ${time(it.mean_s)}`).join("; "),
      grid: { left: 8, right: 12, top: 4, bottom: 28, containLabel: true },
      xAxis: times({ max: before * (narrow(box) ? 1.3 : 1.17), axisLabel: { showMaxLabel: false }, splitLine: { showMaxLine: false, lineStyle: { color: color("line") } } }),
      yAxis: names(rows, { inverse: true, axisLine: { show: false } }),
      tooltip: tooltip({
        formatter: ({ dataIndex: at }) => {
          const it = parts[at];
          if (!it) return tip("a step", [["sum of the parts", time(run.step.sum_s)], ["measured", time(run.step.clock_s)]]);
          return tip(rows[at], [["mean", time(it.mean_s)], ["of a step", percent(it.share)], ["8 of 10 ranks", `${time(it.low_s)} to ${time(it.high_s)}`]]);
        },
      }),
      series: [
        { type: "bar", stack: "all", silent: true, itemStyle: { color: "transparent" }, data: [...starts, 0] },
        {
          type: "bar", stack: "all", barMaxWidth: 20, barMinWidth: 12, barMinHeight: 2,
          data: [
            ...parts.map((it) => ({ value: it.mean_s, itemStyle: { color: partColor(it.part), borderRadius: 2 }, label: labelled("right", said(it)) })),
            { value: before, itemStyle: { color: color("soft"), borderRadius: 2 }, label: labelled("right", time(run.step.clock_s)) },
          ],
        },
      ],
    };
  };

  charts.over_steps = (box) => {
    const { at, each, parts, most_s: most } = run.over_steps;
    const there = PARTS.filter((it) => parts[it].some((value) => value > 0));
    return {
      legend: { show: false },
      grid: { left: 8, right: 16, top: 12, bottom: 26, containLabel: true },
      xAxis: steps(at),
      yAxis: times(),
      tooltip: pointed((found) => tip(stepName(at[found[0].dataIndex], each), [
        ["together", time(found.reduce((sum, it) => sum + (it.seriesName === LONGEST ? 0 : it.value[1] || 0), 0))],
        ...found.filter((it) => it.value[1]).map((it) => [it.seriesName, time(it.value[1]), it.color]).reverse()])),
      series: there.map((part) => line(EXPOSED[part] || part, pairs(at, parts[part]), partColor(part), {
        stack: "all", areaStyle: { color: partColor(part), opacity: 0.9 }, lineStyle: { width: 0 }, symbol: "none",
      })).concat(longest(at, each, most)),
    };
  };

  // Rows are the streams of the rank that is chosen, or of all ranks one under the other.
  const chosenRanks = () => {
    const chosen = document.getElementById("streams-of").value;
    return chosen === "all" ? run.timeline.ranks : [run.timeline.ranks[Number(chosen)]];
  };

  const partOfSpan = (name) => SPANS[name] || name;

  charts.timeline = (box) => {
    const { streams, names: what, units } = run.timeline;
    const ranks = chosenRanks();
    const used = streams.map((_, stream) => ranks.some((it) => it.stream.includes(stream)));
    const shown = streams.map((_, stream) => stream).filter((stream) => used[stream]);
    const rows = ranks.flatMap((it) => shown.map((stream) => it.rank == null ? streams[stream] : `${narrow(box) ? "" : "rank "}${it.rank}, ${streams[stream]}`));
    const data = [];
    ranks.forEach((it, place) => it.stream.forEach((stream, at) => {
      data.push([place * shown.length + shown.indexOf(stream), it.start_us[at] / 1e6, (it.start_us[at] + it.took_us[at]) / 1e6, it.name[at], it.unit[at]]);
    }));
    const end = data.reduce((most, it) => Math.max(most, it[2]), 0);
    const shades = what.map((name) => partColor(partOfSpan(name)));
    box.style.height = `${Math.max(150, rows.length * (ranks.length > 1 ? 22 : 34) + 80)}px`;
    return {
      says: rows.map((name, row) => `${name} ${time(data.reduce((sum, it) => sum + (it[0] === row ? it[2] - it[1] : 0), 0))}`).join("; "),
      grid: { left: 8, right: 14, top: 4, bottom: 58, containLabel: true },
      xAxis: times({ min: 0, max: end, axisLabel: { showMaxLabel: false } }),
      yAxis: names(rows, { inverse: true, axisLine: { show: false }, splitLine: { show: true, lineStyle: { color: color("line") } } }),
      dataZoom: [
        { type: "inside", filterMode: "weakFilter", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true, moveOnMouseWheel: false, minSpan: 0.02 },
        {
          type: "slider", filterMode: "weakFilter", height: 22, bottom: 8, minSpan: 0.02, borderColor: color("line"), brushSelect: false,
          textStyle: { color: color("soft"), fontSize: 11 }, labelFormatter: time, fillerColor: color("hover"),
          handleStyle: { color: color("card"), borderColor: color("soft") }, moveHandleStyle: { color: color("line") }, moveHandleSize: 5, showDataShadow: false,
        },
      ],
      tooltip: tooltip({
        formatter: ({ value: [row, from, to, name, of] }) => tip(what[name], [["unit", unit(units[of])], ["stream", rows[row]], ["took", time(to - from)], ["from", time(from)]]),
      }),
      series: [{
        type: "custom", data, clip: true, encode: { x: [1, 2], y: 0 }, dimensions: ["stream", "from", "to", "what", "unit"],
        renderItem: (params, api) => {
          const [x, y] = api.coord([api.value(1), api.value(0)]);
          const [stop] = api.coord([api.value(2), api.value(0)]);
          const tall = api.size([0, 1])[1] * 0.74;
          const area = params.coordSys;
          const left = Math.max(x, area.x), right = Math.min(stop, area.x + area.width);
          if (right < area.x || left > area.x + area.width) return null;
          const name = api.value(3);
          const wide = right - left;
          const label = wide > 16 && tall > 13 ? fitting(units[api.value(4)] || what[name], Math.floor((wide - 4) / 6.2)) : "";
          return {
            type: "rect",
            shape: { x: left, y: y - tall / 2, width: Math.max(wide - 0.5, 0.7), height: tall, r: wide > 6 ? 2 : 0 },
            style: { fill: shades[name] },
            textContent: label ? { type: "text", style: { text: label, fill: inkOn(shades[name]), fontSize: 11 } } : undefined,
            textConfig: { position: "inside" },
          };
        },
      }],
    };
  };

  // ---- units

  charts.units = (box) => {
    const rows = run.units.rows.filter((it) => it.gather_s || it.reduce_s);
    const series = [["gathers, exposed", "gather", "gather_exposed_s", "g"], ["gathers, hidden", "gather", "gather_s", "g"],
      ["reductions, exposed", "reduce", "reduce_exposed_s", "r"], ["reductions, hidden", "reduce", "reduce_s", "r"]];
    box.style.height = `${44 + 28 * rows.length}px`;
    return {
      legend: { show: false },
      grid: { left: 8, right: 16, top: 10, bottom: 8, containLabel: true },
      xAxis: times(),
      yAxis: names(rows.map((it) => unit(it.fqn)), { inverse: true, axisLine: { show: false }, axisLabel: { formatter: (it) => short(it, narrow(box) ? 16 : 34) } }),
      tooltip: pointed((found) => {
        const it = rows[found[0].dataIndex];
        return tip(unit(it.fqn), [...found.map((one) => [one.seriesName, time(one.value), one.color.colorStops ? "" : one.color]), ["gathered", size(it.gathered_bytes)], ["reduced", size(it.reduced_bytes)]]);
      }),
      series: series.map(([name, shade, key, stack]) => ({
        name, type: "bar", stack, barWidth: 8, barGap: "25%", itemStyle: { color: color(shade), opacity: name.includes("hidden") ? 0.38 : 1 },
        data: rows.map((it) => key.includes("exposed") ? it[key] : Math.max(0, it[key] - it[key.replace("_s", "_exposed_s")])),
      })),
    };
  };

  // ---- memory

  charts.memory = (box) => {
    const { at_s: at, by_state: held, labels, peak, predicted, limit } = run.memory;
    const states = STATES.filter((it) => held[it]).concat(Object.keys(held).filter((it) => !STATES.includes(it)));
    const total = at.map((_, place) => states.reduce((sum, it) => sum + held[it][place], 0));
    const most = Math.max(...total, ...(predicted || [0]));
    const near = limit && limit < most * 1.6;
    const series = states.map((it) => line(it, pairs(at, held[it]), stateColor(it), {
      stack: "all", step: "end", symbol: "none", areaStyle: { color: stateColor(it), opacity: 0.92 }, lineStyle: { width: 0 },
    }));
    series.push(line("all tensors", pairs(at, total), color("text"), {
      keyless: true,
      step: "end", symbol: "none", lineStyle: { width: 0 }, tooltip: { show: false },
      markPoint: {
        symbol: "circle", symbolSize: 9, itemStyle: { color: color("text"), borderColor: color("card"), borderWidth: 2 }, silent: true,
        data: [{ coord: [(at[peak] + (at[peak + 1] ?? at[peak])) / 2, total[peak]] }],
        label: {
          show: true, formatter: `${size(total[peak])}, ${short(labels[peak] || "the peak", narrow(box) ? 26 : 60)}`, color: color("text"), fontSize: 12, fontWeight: 600, offset: [0, -16],
          align: at[peak] < at[at.length - 1] * 0.3 ? "left" : at[peak] > at[at.length - 1] * 0.7 ? "right" : "center",
        },
      },
      markLine: near ? { symbol: "none", silent: true, lineStyle: { color: color("alarm"), type: "solid", width: 1.5 }, data: [{ yAxis: limit }], label: { formatter: `limit ${size(limit)}`, position: "insideStartTop", color: color("alarm"), fontSize: 12 } } : undefined,
    }));
    if (predicted) series.push(line("predicted", pairs(at, predicted), color("text"), { step: "end", symbol: "none", lineStyle: { width: 1.5, type: [5, 4], color: color("text") } }));
    return {
      legend: { show: false },
      grid: { left: 8, right: 18, top: 12, bottom: 8, containLabel: true },
      xAxis: times({ min: 0, max: at[at.length - 1], splitLine: { show: false }, axisLabel: { showMaxLabel: false } }),
      yAxis: sizes({ max: near ? Math.max(limit, most) * 1.08 : most * 1.14, axisLabel: { showMaxLabel: false } }),
      tooltip: pointed((found) => {
        const place = found[0].dataIndex;
        return tip(labels[place] || time(at[place]), [
          ["all tensors", size(total[place])],
          ...(predicted ? [["predicted", size(predicted[place])]] : []),
          ...states.filter((it) => held[it][place]).map((it) => [it, size(held[it][place]), stateColor(it)]).reverse()]);
      }),
      series,
    };
  };

  charts.held = () => {
    const { at, median, most } = run.held;
    const several = run.ranks && run.ranks.of > 1;
    return {
      legend: { show: false },
      grid: { left: 8, right: 16, top: 12, bottom: 26, containLabel: true },
      xAxis: steps(at),
      yAxis: sizes({ min: 0 }),
      tooltip: pointed((found) => tip(`after step ${at[found[0].dataIndex]}`, found.map((it) => [it.seriesName, size(it.value[1]), it.color]))),
      series: several ? [line("the rank that holds most", pairs(at, most), color("gather")), line("the rank in the middle", pairs(at, median), color("forward"))]
        : [line("held", pairs(at, most), color("forward"))],
    };
  };

  // ---- tiers

  const RESTING = { parameters: "parameters at rest", gradients: "gradients that the optimizer sees" };
  charts.tiers = (box) => {
    const { states, rows } = run.tiers;
    const last = (row) => states.filter((it) => row.by_state[it]).pop();
    return {
      legend: { show: false },
      grid: { left: 8, right: narrow(box) ? 62 : 84, top: 4, bottom: 8, containLabel: true },
      xAxis: sizes({ axisLabel: { showMaxLabel: false } }),
      yAxis: names(rows.map((it) => it.name), { inverse: true, axisLine: { show: false }, axisLabel: { width: narrow(box) ? 104 : 160, overflow: "break", lineHeight: 14 } }),
      tooltip: pointed((found) => {
        const row = rows[found[0].dataIndex];
        return tip(row.name, [["all", size(row.nbytes)], ...states.filter((it) => row.by_state[it]).map((it) => [it, size(row.by_state[it]), stateColor(RESTING[it] || it)])]);
      }),
      series: states.map((state) => ({
        name: state, type: "bar", stack: "all", barWidth: 18, itemStyle: { color: stateColor(RESTING[state] || state) },
        data: rows.map((row) => ({
          value: row.by_state[state] ?? 0, itemStyle: { opacity: row.moves ? 0.7 : 1 },
          label: last(row) === state ? labelled("right", size(row.nbytes)) : { show: false },
        })),
      })),
    };
  };

  // ---- ranks

  charts.ranks = () => {
    const rows = [...run.ranks.rows].sort((a, b) => a.rank - b.rank);
    return {
      legend: { show: false },
      grid: { left: 8, right: 16, top: 10, bottom: 8, containLabel: true },
      xAxis: names(rows.map((it) => it.rank), { axisLabel: { formatter: (it) => rows.length > 12 ? it : `rank ${it}`, hideOverlap: true } }),
      yAxis: times(),
      tooltip: pointed((found) => {
        const it = rows[found[0].dataIndex];
        return tip(`rank ${it.rank} on ${it.host}`, [...found.map((one) => [one.seriesName, time(one.value), one.color]), ["busy", it.busy == null ? "–" : percent(it.busy)]]);
      }),
      series: [
        { name: "waits for other ranks, per step", type: "bar", barMaxWidth: 26, barGap: "8%", itemStyle: { color: color("gather"), borderRadius: [2, 2, 0, 0] }, data: rows.map((it) => it.waits_s) },
        { name: "other ranks wait for it, per step", type: "bar", barMaxWidth: 26, itemStyle: { color: color("backward"), borderRadius: [2, 2, 0, 0] }, data: rows.map((it) => it.late_s) },
      ],
    };
  };

  charts.map = () => {
    const { ranks, steps, each, late_s: late, most_s: longest } = run.ranks.map;
    const data = late.flatMap((row, rank) => row.map((value, at) => [at, rank, value, longest[rank][at]]));
    const most = Math.max(1e-6, ...data.map((it) => it[2]));
    const worst = data.find((it) => it[2] === most) || data[0];
    return {
      says: `at most ${time(worst[2])}, for rank ${ranks[worst[1]]} in ${stepName(steps[worst[0]], each)}`,
      grid: { left: 8, right: 16, top: 8, bottom: 52, containLabel: true },
      xAxis: names(steps, { axisLabel: { color: color("soft"), hideOverlap: true } }),
      yAxis: names(ranks, { inverse: true, axisLine: { show: false }, axisLabel: { formatter: (it) => ranks.length > 12 ? it : `rank ${it}`, hideOverlap: true } }),
      tooltip: tooltip({ formatter: ({ value: [at, rank, value, longest] }) => tip(`rank ${ranks[rank]}, ${stepName(steps[at], each)}`,
        [["others wait for it", time(value)], ...(each > 1 ? [["at most", time(longest)]] : [])]) }),
      visualMap: {
        dimension: 2, min: 0, max: most, calculable: false, orient: "horizontal", left: 0, bottom: 0, itemWidth: 12, itemHeight: 150, text: [time(most), "0"],
        textStyle: { color: color("soft"), fontSize: 12 }, inRange: { color: [color("cold"), color("warm"), color("hot")] },
      },
      series: [{ type: "heatmap", data, progressive: 4000, emphasis: { itemStyle: { borderColor: color("text"), borderWidth: 1 } } }],
    };
  };

  charts.skew = () => {
    const { at, each, apart_s: apart, most_s: most } = run.ranks.skew;
    return {
      grid: { left: 8, right: 16, top: 12, bottom: 26, containLabel: true },
      xAxis: steps(at),
      yAxis: times({ min: 0, splitNumber: 3 }),
      tooltip: pointed((found) => tip(stepName(at[found[0].dataIndex], each), [["between first and last", time(found[0].value[1])], ...found.slice(1).map((it) => [it.seriesName, time(it.value[1])])])),
      series: [line("skew", pairs(at, apart), color("backward"), { areaStyle: { color: color("backward"), opacity: 0.15 } }), ...longest(at, each, most)],
    };
  };

  // ---- shards

  const parameters = () => run.shards.parameters.map(([fqn, of, shape, dtype, dim, cut, ranks, packed, padding, bytes]) =>
    ({ fqn, of, shape, dtype, dim, cut, ranks, packed, padding, bytes }));
  const LARGEST = 20;

  charts.owned = () => {
    const owned = run.shards.owned_bytes;
    return {
      says: `from ${size(Math.min(...owned))} to ${size(Math.max(...owned))}`,
      grid: { left: 8, right: 16, top: 12, bottom: 8, containLabel: true },
      xAxis: names(owned.map((_, rank) => rank), { axisLabel: { formatter: (it) => owned.length > 12 ? it : `rank ${it}`, hideOverlap: true } }),
      yAxis: sizes({ splitNumber: 3 }),
      tooltip: pointed((found) => tip(`rank ${found[0].dataIndex}`, [["owns", size(found[0].value)], ["of the whole", percent(found[0].value / run.shards.nbytes)]])),
      series: [{ type: "bar", barMaxWidth: 36, data: owned.map((value, rank) => ({ value, itemStyle: { color: rankColor(rank, owned.length), borderRadius: [2, 2, 0, 0] } })) }],
    };
  };

  charts.shards = (box) => {
    const chosen = document.getElementById("shards-of").value;
    const rows = parameters().filter((it) => chosen === "all" || it.of === Number(chosen)).slice(0, chosen === "all" ? LARGEST : 60);
    const data = rows.flatMap((it, row) => {
      const count = Math.max(1, it.shape[it.dim] ?? 1);
      const ends = Array.isArray(it.cut) ? it.cut : Array.from({ length: it.ranks }, (_, rank) => Math.min((rank + 1) * it.cut, count));
      return ends.map((end, rank) => [row, (ends[rank - 1] ?? 0) / count, end / count, rank, ends[rank - 1] ?? 0, end]).filter((one) => one[2] > one[1]);
    });
    box.style.height = `${46 + 26 * rows.length}px`;
    const prefix = chosen === "all" ? "" : run.shards.units[Number(chosen)] + ".";
    const name = (it) => it.fqn.startsWith(prefix) ? it.fqn.slice(prefix.length) : it.fqn;
    return {
      says: rows.map((it) => `${name(it)} ${size(it.bytes)}`).join("; "),
      grid: { left: 8, right: 4, top: 4, bottom: 8, containLabel: true },
      xAxis: times({ min: 0, max: 1, splitLine: { show: false }, axisLabel: { formatter: (it) => percent(it) } }),
      yAxis: [
        names(rows.map(name), { inverse: true, axisLine: { show: false }, axisLabel: { formatter: (it) => short(it, narrow(box) ? 18 : 40) } }),
        names(rows.map((it) => size(it.bytes) + (it.packed && !narrow(box) ? ", packed" : "")), { inverse: true, position: "right", axisLine: { show: false }, axisLabel: { color: color("soft") } }),
      ],
      tooltip: tooltip({
        formatter: ({ value: [row, , , rank, from, to] }) => {
          const it = rows[row];
          return tip(it.fqn, [["rank", rank], [`of dim ${it.dim}`, `${from} up to ${to}`], ["shape", it.shape.join(" × ")], ["dtype", it.dtype], ["size", size(it.bytes)],
            ["travels", it.packed ? "packed" : "in place"], ["padding", size(it.padding)]]);
        },
      }),
      series: [
        { type: "bar", yAxisIndex: 1, data: [], silent: true },
        {
          type: "custom", data, encode: { x: [1, 2], y: 0 },
          renderItem: (params, api) => {
            const [x, y] = api.coord([api.value(1), api.value(0)]);
            const [stop] = api.coord([api.value(2), api.value(0)]);
            const it = rows[api.value(0)];
            const wide = stop - x;
            return {
              type: "rect", shape: { x, y: y - 8, width: Math.max(wide - (wide > 4 ? 1 : 0), 0.5), height: 16 },
              style: { fill: rankColor(api.value(3), it.ranks), opacity: it.packed ? 0.55 : 1 },
              textContent: wide > 22 ? { type: "text", style: { text: String(api.value(3)), fill: it.packed ? color("text") : inkOn(rankColor(api.value(3), it.ranks)), fontSize: 11 } } : undefined,
              textConfig: { position: "inside" },
            };
          },
        },
      ],
    };
  };

  // ---- training

  charts.curve = (box) => {
    const { at, each, curves, units = {} } = run[box.dataset.of];
    const name = box.dataset.curve;
    const of = name === "MFU" ? "share" : units[name] || "";
    const said = (it) => it == null ? "–" : of === "share" ? percent(it) : of.startsWith("bytes") ? size(it) + of.slice(5) : of === "Hz" ? digits(it / 1e9) + " GHz"
      : digits(it) + (of === "1/s" ? " /s" : of && " " + of);
    const known = (values) => pairs(at, values).filter((it) => it[1] != null); // loops may log every tenth step
    const points = known(curves[name].mean);
    const bounds = [["the smallest", "low"], ["the largest", "high"]].filter(([, which]) => curves[name][which]);
    const there = points.map((it) => it[1]);
    const flat = Math.max(...there) - Math.min(...there) < 0.2 * Math.max(...there.map(Math.abs));
    return {
      grid: { left: 4, right: 14, top: 10, bottom: 4, containLabel: true },
      xAxis: steps(at, { name: "", splitNumber: 4, axisLabel: { fontSize: 11 } }),
      yAxis: axis({ type: "value", scale: !flat, min: flat ? 0 : undefined, splitNumber: 3, axisLabel: { color: color("soft"), fontSize: 11, formatter: said } }),
      tooltip: pointed((found) => tip(stepName(found[0].value[0], each), found.map((it) => [it.seriesName, said(it.value[1])]))),
      series: [line(name, points, color("forward")), ...bounds.map(([what, which]) => line(what, known(curves[name][which]), color("soft"), { symbol: "none", lineStyle: { width: 0.8, color: color("soft") } }))],
    };
  };

  // ---- beside another run

  const beside = (rows, shade, said) => (box) => {
    const change = ([ours, theirs]) => ours == null || theirs == null || Math.abs(ours - theirs) < 0.01 * Math.max(ours, theirs) ? ""
      : (ours > theirs ? "+" : "−") + said(Math.abs(ours - theirs));
    const other = run.against.name === run.name ? `${run.name} (the other)` : run.against.name;
    return {
      legend: { show: false },
      grid: { left: 4, right: 124, top: 6, bottom: 4, containLabel: true },
      xAxis: (said === time ? times : sizes)({ axisLabel: { show: false }, splitLine: { show: false } }),
      yAxis: names(rows().map((it) => EXPOSED[it.name] || it.name), { inverse: true, axisLine: { show: false }, axisLabel: { width: narrow(box) ? 100 : 130, overflow: "break", lineHeight: 14 } }),
      tooltip: pointed((found) => {
        const it = rows()[found[0].dataIndex];
        return tip(it.name, [[run.name, said(it.values[0])], [other, said(it.values[1])], ["difference", change(it.values) || "below 1 %"]]);
      }),
      series: [[run.name, 0, 1], [other, 1, 0.4]].map(([name, place, opacity]) => ({
        name, type: "bar", barWidth: 12, barGap: "15%", itemStyle: { color: color("soft"), opacity },
        data: rows().map((it) => ({
          value: it.values[place], itemStyle: { color: shade(it.name), opacity, borderRadius: 2 },
          label: { ...labelled("right", place ? said(it.values[1]) : `${said(it.values[0])}  {change|${change(it.values)}}`), opacity: 1, color: color(place ? "soft" : "text"), rich: { change: { color: color("soft"), fontSize: 12 } } },
        })),
      })),
    };
  };
  charts.parts_beside = beside(() => run.against.parts, partColor, time);
  charts.states_beside = beside(() => run.against.states, stateColor, size);

  // ---- the page

  const boxes = [...document.querySelectorAll(".chart")];

  // The key of a chart stands before it: words wrap there, and a click leaves a series out or brings it back.
  const key = (box, chart, series) => {
    const told = series.filter((it) => it.name && !it.keyless);
    let list = box.previousElementSibling;
    if (!list || !list.classList.contains("legend")) {
      list = document.createElement("p");
      list.className = "key legend";
      box.before(list);
    }
    list.replaceChildren(...(told.length > 1 ? told : []).map((it) => {
      const item = document.createElement("button");
      const swatch = document.createElement("i");
      swatch.className = "swatch";
      swatch.style.background = it.itemStyle.color;
      swatch.style.opacity = it.itemStyle.opacity ?? 1;
      item.type = "button";
      item.setAttribute("aria-pressed", "true");
      item.append(swatch, it.name);
      item.addEventListener("click", () => {
        chart.dispatchAction({ type: "legendToggleSelect", name: it.name });
        item.setAttribute("aria-pressed", item.getAttribute("aria-pressed") === "false");
      });
      return item;
    }));
  };

  // What a chart shows in words, for those who do not see it: the range of each series.
  const described = ({ xAxis, yAxis, series }) => {
    const values = [xAxis, yAxis].flat().filter((it) => it.type === "value").pop();
    const said = typeof values?.axisLabel?.formatter === "function" ? values.axisLabel.formatter : digits;
    return series.filter((it) => it.name && it.data.length).map((it) => {
      const known = it.data.map((point) => Array.isArray(point) ? point[1] : point?.value ?? point).filter(Number.isFinite);
      return known.length ? `${it.name} from ${said(Math.min(...known))} to ${said(Math.max(...known))}` : "";
    }).filter(Boolean).join("; ");
  };

  const draw = (box) => {
    const { width } = box.getBoundingClientRect();
    const option = { ...whole(), ...charts[box.dataset.chart](box) };
    const known = echarts.getInstanceByDom(box);
    const chart = known || echarts.init(box);
    box.dataset.title ??= box.getAttribute("aria-label");
    box.setAttribute("aria-label", `${box.dataset.title}: ${option.says || described(option)}`);
    if (known) chart.resize();
    chart.setOption(option, { notMerge: true });
    if (option.legend) key(box, chart, option.series);
    box.dataset.drawn = Math.round(width);
    return chart;
  };

  const paint = () => {
    for (const it of document.querySelectorAll("[data-state]")) it.style.background = stateColor(it.dataset.state);
    for (const it of document.querySelectorAll("[data-part]")) it.style.background = partColor(it.dataset.part);
  };

  // One chart after the other, so that the page answers in between.
  const drawAll = () => {
    delete root.dataset.drawn;
    const left = [...boxes];
    const next = () => {
      const box = left.shift();
      if (!box) { root.dataset.drawn = "yes"; return; }
      draw(box);
      setTimeout(next);
    };
    next();
  };

  const drawNow = () => boxes.forEach(draw);

  const option = (select, value, label) => select.append(new Option(label, value));

  const streams = () => {
    const select = document.getElementById("streams-of");
    if (!select) return;
    const { ranks, names: what } = run.timeline;
    if (ranks.length > 1 && ranks.length <= 8) option(select, "all", "all");
    ranks.forEach((it, place) => option(select, place, it.rank + (it.why ? `, which ${it.why}` : "")));
    const box = boxes.find((it) => it.dataset.chart === "timeline");
    const chart = () => echarts.getInstanceByDom(box);
    select.addEventListener("change", () => draw(box));
    const zoom = (factor) => {
      const { start, end } = chart().getOption().dataZoom[0];
      const middle = (start + end) / 2, half = (end - start) / 2 * factor;
      chart().dispatchAction({ type: "dataZoom", start: Math.max(0, middle - half), end: Math.min(100, middle + half) });
    };
    document.getElementById("zoom-in").addEventListener("click", () => zoom(0.5));
    document.getElementById("zoom-out").addEventListener("click", () => zoom(2));
    document.getElementById("zoom-all").addEventListener("click", () => chart().dispatchAction({ type: "dataZoom", start: 0, end: 100 }));
    const key = document.getElementById("streams-key");
    for (const name of what) {
      const item = document.createElement("span");
      const swatch = document.createElement("i");
      swatch.className = "swatch";
      swatch.dataset.part = partOfSpan(name);
      item.append(swatch, name);
      key.append(item);
    }
  };

  const shards = () => {
    const select = document.getElementById("shards-of");
    if (!select) return;
    option(select, "all", `the ${Math.min(LARGEST, run.shards.parameters.length)} largest parameters`);
    run.shards.units.forEach((fqn, place) => option(select, place, unit(fqn)));
    select.addEventListener("change", () => draw(boxes.find((it) => it.dataset.chart === "shards")));
  };

  const cell = (row, place) => {
    const found = row.cells[place];
    const value = found.dataset.v ?? found.textContent;
    const number = Number(value);
    return value.trim() !== "" && Number.isFinite(number) ? number : value === "" || value === "None" ? -Infinity : value;
  };

  const sortable = (table) => {
    const body = table.tBodies[0];
    const heads = [...table.tHead.querySelectorAll("th[data-sort]")];
    const wide = heads.filter((it) => it.rowSpan === 2);
    const order = wide.length ? [...wide, ...heads.filter((it) => it.rowSpan !== 2)] : heads;
    order.forEach((head, place) => {
      head.tabIndex = 0;
      const sort = () => {
        const up = head.getAttribute("aria-sort") === "descending";
        heads.forEach((it) => it.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const shown = [...body.rows].filter((it) => !it.hidden).length;
        const rows = [...body.rows].sort((a, b) => {
          const [x, y] = [cell(a, place), cell(b, place)];
          return (x < y ? 1 : x > y ? -1 : 0) * (up ? -1 : 1);
        });
        rows.forEach((row, at) => { row.hidden = at >= shown; });
        body.append(...rows);
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); } });
    });
  };

  const more = (button) => button.addEventListener("click", () => {
    for (const row of button.previousElementSibling.querySelectorAll("tr[hidden]")) row.hidden = false;
    button.remove();
  });

  // When `fullshard report --watch` serves the page, poll for a newer version.
  const follow = async () => {
    let seen = null;
    for (;;) {
      try {
        const answer = await fetch("version", { cache: "no-store" });
        if (!answer.ok) return;
        const version = await answer.text();
        if (seen !== null && version !== seen) { location.reload(); return; }
        seen = version;
      } catch { /* not there for the moment */ }
      await new Promise((later) => setTimeout(later, 2000));
    }
  };

  streams();
  shards();
  document.querySelectorAll("table.sortable").forEach(sortable);
  document.querySelectorAll("button.more").forEach(more);
  document.getElementById("theme").addEventListener("click", window.switchTheme);
  const label = () => { document.getElementById("theme").textContent = root.dataset.theme === "dark" ? "Light" : "Dark"; };
  label();
  addEventListener("theme", () => { label(); paint(); drawAll(); });
  let waiting;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => boxes.filter((it) => Math.round(it.getBoundingClientRect().width) !== Number(it.dataset.drawn)).forEach(draw), 120);
  });
  let before;
  addEventListener("beforeprint", () => { before = root.dataset.theme; root.dataset.theme = "light"; paint(); drawNow(); });
  addEventListener("afterprint", () => { root.dataset.theme = before; paint(); drawNow(); });
  paint();
  drawAll();
  if (location.hostname === "127.0.0.1") follow();
})();
