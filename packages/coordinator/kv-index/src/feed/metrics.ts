/** The feeds of all models, as Prometheus sees them: summed up where they have no label. */
import { Counter, Gauge, type Registry } from 'prom-client';
import type { FeedState } from './index-feed.ts';
import { breakKinds, type FeedTotals, sumOf } from './totals.ts';

/** Registers `kvtier_kv_index_*`. `states`: of the feeds that there are now; `past`: of those that have ended. */
export function feedMetrics(states: () => readonly FeedState[], past: () => FeedTotals, registry: Registry): void {
  const registers = [registry];
  const totals = (): FeedTotals => sumOf([past(), ...states().map((state) => state.totals)]);
  const sum = (which: (state: FeedState) => number): number =>
    states().reduce((total, state) => total + which(state), 0);
  new Gauge({
    ...{ name: 'kvtier_kv_index_bytes', help: 'Memory of the KV index, names of blocks included', registers },
    collect() {
      this.set(sum(({ index, namesBytes }) => index.bytes + namesBytes));
    },
  });
  new Gauge({
    ...{ name: 'kvtier_kv_index_max_bytes', help: 'Its bound', registers },
    collect() {
      this.set(sum(({ maxBytes }) => maxBytes));
    },
  });
  new Gauge({
    ...{ name: 'kvtier_kv_index_blocks', help: 'Different blocks that it lists', registers },
    collect() {
      this.set(sum(({ index }) => index.blocks));
    },
  });
  new Gauge({
    ...{
      name: 'kvtier_kv_index_guessed_workers',
      help: 'Workers whose KV events do not tell what they hold',
      registers,
    },
    collect() {
      this.set(sum(({ workers }) => workers.filter(({ why }) => why !== undefined).length));
    },
  });
  new Gauge({
    ...{ name: 'kvtier_kv_index_unheard_nodes', help: 'Cache nodes of which nothing is counted', registers },
    collect() {
      this.set(sum(({ nodes }) => nodes.filter(({ why }) => why !== undefined).length));
    },
  });
  new Gauge({
    ...{ name: 'kvtier_kv_index_lag_seconds', help: 'How late KV events come', registers },
    labelNames: ['publisher'],
    collect() {
      this.reset();
      for (const { workers, nodes } of states())
        for (const { name, lagS } of [...workers, ...nodes]) this.set({ publisher: name }, lagS);
    },
  });
  new Counter({
    ...{ name: 'kvtier_kv_index_dropped_blocks_total', help: 'Blocks forgotten for want of space', registers },
    collect() {
      this.reset();
      this.inc(totals().droppedBlocks);
    },
  });
  new Counter({
    ...{
      name: 'kvtier_kv_index_unnamed_blocks_total',
      help: 'Blocks of cache nodes beside pods of which no tokens were known when they were told of',
      registers,
    },
    collect() {
      this.reset();
      this.inc(totals().unnamedBlocks);
    },
  });
  new Counter({
    ...{
      name: 'kvtier_kv_index_breaks_total',
      help: 'Gaps, restarts, snapshots and reconnects of KV events',
      registers,
    },
    labelNames: ['kind'],
    collect() {
      this.reset();
      const { breaks } = totals();
      for (const kind of breakKinds) this.inc({ kind }, breaks[kind]);
    },
  });
  new Counter({
    ...{ name: 'kvtier_kv_index_ignored_events_total', help: 'KV events that cannot be', registers },
    labelNames: ['kind'],
    collect() {
      this.reset();
      for (const [kind, count] of Object.entries(totals().lies)) this.inc({ kind }, count);
    },
  });
}
