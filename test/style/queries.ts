/**
 * Queries of Prometheus, as infra/ has them, against what docs/metrics.md says that there is, which metrics.test.ts compares with the source,
 * and against what the connectors for engines in Python tell.
 */
import { codesIn, tableRows } from './docs.ts';
import { filesBelow, isTest, read } from './tree.ts';

/** What Prometheus adds, and our metrics of workers where there are several. */
const always = ['instance', 'job', 'worker'];
const rows = tableRows('docs/metrics.md').filter(([name]) => name!.startsWith('`kvtier_'));
const labelsOf = new Map(rows.map(([name, labels]) => [codesIn(name!)[0]!, [...codesIn(labels!), ...always]]));
const valuesOf = new Map(rows.map(([name, , words]) => [codesIn(name!)[0]!, codesIn(words!)]));

/** Of others: what our connectors tell at vLLM and SGLang, by their sources, and what we ask of vLLM itself and of Prometheus. */
const connectors = 'packages/connector/python/src/kvtier';
const stats = read(`${connectors}/vllm/stats.py`);
const namesOf = (dict: string): string[] => {
  const text = new RegExp(`^${dict}: dict\\[str, str\\] = \\{\\n([\\s\\S]*?)^\\}`, 'm').exec(stats)![1]!;
  return [...text.matchAll(/^ {4}"(\w+)":/gm)].map(([, name]) => name!);
};
const ofVllm = [...always, 'engine', 'model_name'];
const ofOthers = new Map<string, readonly string[]>([
  ...namesOf('COUNTERS').map((name) => [`vllm:kvtier_${name}_total`, ofVllm] as const),
  ...namesOf('GAUGES').map((name) => [`vllm:kvtier_${name}`, ofVllm] as const),
  [`vllm:kvtier_${/PREFIX \+ "(denied)"/.exec(stats)![1]!}_total`, [...ofVllm, 'reason']],
  [/^NAME = "(sglang:\w+)"$/m.exec(read(`${connectors}/sglang/gauges.py`))![1]!, always],
  ['vllm:prompt_tokens_total', ofVllm],
  // Prometheus' own word of a target.
  ['up', [...always, 'container']],
]);

const counts = ['docs/counts.md', 'docs/reasons.md'].flatMap((page) =>
  tableRows(page).flatMap(([names, ...rest]) => [...codesIn(names!), ...rest.flatMap(codesIn)]),
);

const sources = filesBelow('packages', ['.ts']).filter((path) => !isTest(path) && /metrics\.ts$/.test(path));
const histograms = new Set(
  sources
    .map(read)
    .flatMap((text) => [
      ...[...text.matchAll(/new Histogram\(\{\s*name: '(kvtier_\w+)'/g)].map(([, name]) => name!),
      ...[...text.matchAll(/#phase\('(\w+)'/g)].map(([, name]) => `kvtier_engine_${name}_seconds`),
    ]),
);

/** Labels whose values are names of ours. */
const named = ['event', 'name', 'what', 'state', 'decision', 'outcome'];

interface Series {
  readonly metric: string;
  readonly labels: readonly string[];
  /** Where it stands in the query. */
  readonly at: number;
}

/** What is wrong with a query, in lines; none: all of its metrics, labels and names are there. */
export function problemsOf(query: string): string[] {
  const problems: string[] = [];
  const series: Series[] = [];
  for (const { 1: name, 2: selectors = '', index } of query.matchAll(
    /(?<![\w:])((?:(?:vllm|sglang):|kvtier_)\w+|up\b)(?:\{([^}]*)\})?/g,
  )) {
    const found = declared(name!);
    if (found === undefined) {
      problems.push(`${name}: no such metric${histograms.has(name!) ? ' without _bucket, _sum or _count' : ''}`);
      continue;
    }
    series.push({ ...found, at: index });
    for (const [, label, operator, value] of selectors.matchAll(/(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"/g)) {
      if (!found.labels.includes(label!)) problems.push(`${name}: has no label ${label}`);
      if (named.includes(label!)) problems.push(...unknownIn(found.metric, operator!, value!));
    }
  }
  if (!/\bkvtier_/.test(query)) problems.push('asks for nothing of kvtier');
  for (const { 1: list, index } of query.matchAll(/\bby \(([^)]*)\)/g)) {
    const of = series.find(({ at }) => at > index);
    for (const label of list!.split(/,\s*/))
      if (!of?.labels.includes(label)) problems.push(`${of?.metric}: is grouped by ${label}, which it has not`);
  }
  return problems;
}

/** Labels that its answer may have. */
export const groupedBy = (query: string): ReadonlySet<string> =>
  new Set([...query.matchAll(/\bby \(([^)]*)\)/g)].flatMap(([, list]) => list!.split(/,\s*/)));

function declared(name: string): { readonly metric: string; readonly labels: readonly string[] } | undefined {
  if (ofOthers.has(name)) return { metric: name, labels: ofOthers.get(name)! };
  const metric = name.replace(/_(bucket|sum|count)$/, '');
  if (metric !== name && histograms.has(metric))
    return { metric, labels: [...labelsOf.get(metric)!, ...(name.endsWith('_bucket') ? ['le'] : [])] };
  const labels = labelsOf.get(name);
  return labels === undefined || histograms.has(name) ? undefined : { metric: name, labels };
}

/** A regular expression of names: each of its alternatives is one, or matches one. */
function unknownIn(metric: string, operator: string, value: string): string[] {
  const known = [...counts, ...valuesOf.get(metric)!];
  const isOne = (text: string): boolean =>
    operator.endsWith('~')
      ? known.some((name) => new RegExp(`^(?:${text.replaceAll('\\\\', '\\')})$`).test(name))
      : known.includes(text);
  const parts = operator.endsWith('~') ? value.split('|') : [value];
  return parts.filter((part) => !isOne(part)).map((part) => `${metric}: no ${part} is documented`);
}
