/** What the planner plans, `kvtier_planner_*`: as of its last look. Models beyond the first names are one, "other". */
import { Gauge, Registry } from '@kvtier/telemetry/metrics';
import type { ModelPlan, Planner } from './planner.ts';

/** Values of the label `model`. */
const maxNames = 16;

/** In Prometheus' text form when it is asked for. */
export function plannerMetrics(planner: Pick<Planner, 'plans'>): () => Promise<string> {
  const registry = new Registry();
  const registers = [registry];
  const each = <Label extends string>(
    gauge: Gauge<'model' | Label>,
    add: (labels: { readonly model: string }, plan: ModelPlan) => void,
  ): void => {
    gauge.reset();
    for (const [at, plan] of planner.plans().entries()) add({ model: at < maxNames ? plan.model : 'other' }, plan);
  };
  new Gauge({
    name: 'kvtier_planner_workers_needed',
    help: 'Workers that the load needs, with their fraction, by what they do',
    labelNames: ['model', 'role'] as const,
    registers,
    collect() {
      each(this, ({ model }, { prefill, decode }) => {
        this.inc({ model, role: 'prefill' }, prefill.needed);
        this.inc({ model, role: 'decode' }, decode.needed);
      });
    },
  });
  new Gauge({
    name: 'kvtier_planner_workers_present',
    help: 'Workers that are ready, by what they do now',
    labelNames: ['model', 'role'] as const,
    registers,
    collect() {
      each(this, ({ model }, { present }) => {
        for (const [role, count] of Object.entries(present)) this.inc({ model, role }, count);
      });
    },
  });
  new Gauge({
    name: 'kvtier_planner_demand_tokens_per_second',
    help: 'prefill: prompt tokens that no cache has; decode: tokens of answers',
    labelNames: ['model', 'role'] as const,
    registers,
    collect() {
      each(this, ({ model }, { prefill, decode }) => {
        this.inc({ model, role: 'prefill' }, prefill.demandTokensPerS);
        this.inc({ model, role: 'decode' }, decode.demandTokensPerS);
      });
    },
  });
  new Gauge({
    name: 'kvtier_planner_hit_ratio',
    help: 'Share of prompt tokens that chosen workers held or could have brought, within the window',
    labelNames: ['model'] as const,
    registers,
    collect() {
      this.reset();
      for (const { model, load } of planner.plans().slice(0, maxNames)) this.set({ model }, load.hitRatio);
    },
  });
  new Gauge({
    name: 'kvtier_planner_target_reachable',
    help: '0: however many workers there are, the target of this role is missed',
    labelNames: ['model', 'role'] as const,
    registers,
    collect() {
      this.reset();
      for (const { model, prefill, decode } of planner.plans().slice(0, maxNames)) {
        this.set({ model, role: 'prefill' }, prefill.isReachable ? 1 : 0);
        this.set({ model, role: 'decode' }, decode.isReachable ? 1 : 0);
      }
    },
  });
  return () => registry.metrics();
}
