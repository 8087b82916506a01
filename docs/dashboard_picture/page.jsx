// Draws the panels of a Grafana dashboard with Grafana's own components, from answers of a Prometheus.
import React from 'react';
import { createRoot } from 'react-dom/client';
import { FieldType, ThemeContext, createTheme, dateTime, getDisplayProcessor, getFieldDisplayValues } from '@grafana/data';
import { BigValue, GlobalStyles, PanelChrome, TimeSeries } from '@grafana/ui';

const [dashboard, answers] = await Promise.all(
  ['dashboard.json', 'answers.json'].map(async (name) => (await fetch(name)).json()),
);
const theme = createTheme({ colors: { mode: 'dark' } });
const WIDTH = 1400, COLUMNS = 24, ROW_HEIGHT = 38, GAP = 8;
const from = dateTime(answers.from_s * 1000), to = dateTime(answers.to_s * 1000);
const timeRange = { from, to, raw: { from, to } };

// What Grafana takes where a dashboard says nothing.
const DEFAULTS = {
  stat: { color: { mode: 'thresholds' }, thresholds: { mode: 'absolute', steps: [{ value: -Infinity, color: 'green' }] } },
  timeseries: { color: { mode: 'palette-classic' } },
};

function framesOf(panel) {
  let seriesIndex = 0;
  return panel.targets.flatMap((target) => answers.panels[panel.id][target.refId].map(({ metric, values }) => {
    const name = target.legendFormat.replace(/{{\s*(\w+)\s*}}/g, (_, label) => metric[label] ?? '');
    const time = { name: 'Time', type: FieldType.time, config: { interval: answers.step_s * 1000 }, values: values.map(([at_s]) => at_s * 1000) };
    const value = {
      name: 'Value', type: FieldType.number,
      config: { ...DEFAULTS[panel.type], ...panel.fieldConfig.defaults, displayNameFromDS: name },
      state: { seriesIndex: seriesIndex++ },
      values: values.map(([, text]) => (text === 'NaN' ? null : Number(text))),
    };
    for (const field of [time, value]) field.display = getDisplayProcessor({ field, theme, timeZone: 'utc' });
    return { refId: target.refId, length: values.length, fields: [time, value] };
  }));
}

function Stat({ panel, frames, width, height }) {
  const shown = getFieldDisplayValues({
    data: frames, fieldConfig: panel.fieldConfig, reduceOptions: panel.options.reduceOptions,
    replaceVariables: (text) => text, theme, timeZone: 'utc', sparkline: true,
  });
  return shown.map(({ display, sparkline }, index) => (
    <BigValue key={index} theme={theme} width={width} height={height / shown.length} value={display} sparkline={sparkline}
      colorMode="value" graphMode="area" justifyMode="auto" textMode={panel.options.textMode} />
  ));
}

function Content({ panel, width, height }) {
  const frames = framesOf(panel);
  if (frames.length === 0) return <div style={{ textAlign: 'center', lineHeight: `${height}px` }}>No data</div>;
  if (panel.type === 'stat') return <Stat panel={panel} frames={frames} width={width} height={height} />;
  const legend = { showLegend: true, calcs: [], ...panel.options.legend };
  return <TimeSeries frames={frames} timeRange={timeRange} timeZone="utc" width={width} height={height} legend={legend} />;
}

function Panel({ panel }) {
  const { x, y, w, h } = panel.gridPos, column = WIDTH / COLUMNS;
  const width = w * column - GAP, height = h * ROW_HEIGHT - GAP;
  return (
    <div style={{ position: 'absolute', left: x * column + GAP / 2, top: y * ROW_HEIGHT + GAP / 2 }}>
      <PanelChrome title={panel.title} description={panel.description} width={width} height={height}>
        {(innerWidth, innerHeight) => <Content panel={panel} width={innerWidth} height={innerHeight} />}
      </PanelChrome>
    </div>
  );
}

createRoot(document.getElementById('root')).render(
  <ThemeContext.Provider value={theme}>
    <GlobalStyles />
    {dashboard.panels.map((panel) => <Panel key={panel.id} panel={panel} />)}
  </ThemeContext.Provider>,
);
