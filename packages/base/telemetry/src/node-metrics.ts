/**
 * What a cache node says of itself, in Prometheus' text form: the same names wherever it is told, at the node's own listener or by an engine
 * that asked it. Written here, not by a registry: a node of many tenants has tens of thousands of samples, and nobody may wait for them.
 */

export interface NodeFigures {
  readonly tiers: readonly TierFigures[];
  readonly counters: Readonly<Record<string, Figure>>;
}

type Figure = number | bigint;

const tierGauges = ['blocks', 'bytes', 'capacityBytes', 'hits', 'misses', 'evictions', 'corrupt'] as const;

type TierFigures = Readonly<Record<(typeof tierGauges)[number], Figure>> & {
  readonly tier: string;
  readonly inService: boolean;
  readonly detail: Readonly<Record<string, number>>;
};

/** Of one piece: some milliseconds of a slow processor. */
const samplesPerPiece = 250;

export const nodeMetricsText = (figures: NodeFigures): string => [...nodeMetricsPieces(figures)].join('');

/** The same text in pieces, for whoever has other things to do in between. */
export function* nodeMetricsPieces({ tiers, counters }: NodeFigures): Generator<string> {
  let lines: string[] = [];
  for (const [name, help, samples] of familiesOf(tiers, counters)) {
    lines.push(`# HELP kvtier_${name} ${help}`, `# TYPE kvtier_${name} gauge`);
    for (const [labels, value] of samples) {
      lines.push(`kvtier_${name}${labels} ${value}`);
      if (lines.length < samplesPerPiece) continue;
      yield `${lines.join('\n')}\n`;
      lines = [];
    }
    lines.push('');
  }
  yield lines.join('\n');
}

type Family = readonly [name: string, help: string, samples: Iterable<readonly [labels: string, value: Figure]>];
const gauge = (...family: Family): Family => family;

function* familiesOf(tiers: NodeFigures['tiers'], counters: NodeFigures['counters']): Generator<Family> {
  for (const field of tierGauges) {
    const name = field.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
    const help = `${name.replace('_', ' ')} of a tier, as the cache node tells it`;
    yield gauge(
      `tier_${name}`,
      help,
      tiers.map((tier) => [`{${label('tier', tier.tier)}}`, tier[field]]),
    );
  }
  yield gauge(
    'tier_in_service',
    '0: the tier is out of service',
    tiers.map(({ tier, inService }) => [`{${label('tier', tier)}}`, Number(inService)]),
  );
  yield gauge('tier_detail', 'What only this kind of tier has or counts, by name', detailsOf(tiers));
  const longestS = Number(counters['turns.longest_us'] ?? 0) / 1e6;
  yield gauge('node_longest_turn_seconds', 'CPU time of the longest turn of the node’s event loop', [['', longestS]]);
  yield gauge('node_events', 'What the cache node counts, by name', eventsOf(counters));
}

function* detailsOf(tiers: NodeFigures['tiers']): Generator<readonly [string, number]> {
  for (const { tier, detail } of tiers)
    for (const [name, value] of Object.entries(detail))
      yield [`{${label('tier', tier)},${label('name', name)}}`, value];
}

function* eventsOf(counters: NodeFigures['counters']): Generator<readonly [string, Figure]> {
  for (const event in counters) yield [`{${label('event', event)}}`, counters[event]!];
}

/** Of a tenant's name, which an engine chose, anything may be a part. */
const label = (name: string, value: string): string =>
  `${name}="${/[\\"\n]/.test(value) ? value.replace(/[\\"\n]/g, (at) => (at === '\n' ? '\\n' : `\\${at}`)) : value}"`;
