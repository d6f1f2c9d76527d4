/**
 * What else pods call a model: aliases, which are the model, and LoRA adapters, whose keys and values are others for the same tokens. Not
 * every pod knows every name: requests go to those that do.
 */
import type { OtherName, Worker } from '@kvtier/registry';
import type { TextModel } from './text-model.ts';
import type { LoadedText } from './text-pool.ts';

/** `among`: names of the pods that know it. */
export type OtherNames = readonly (OtherName & { readonly among: ReadonlySet<string> })[];

/** Of one model, of all its pods; names beyond are not served. */
const mostNames = 256;

/** An adapter for one of the pods is one for all. */
export function otherNamesOf({ name, isPassedOn }: TextModel, workers: readonly (Worker | undefined)[]): OtherNames {
  const others = new Map<string, OtherName & { readonly among: Set<string> }>();
  if (!isPassedOn) return [];
  for (const worker of workers) {
    if (worker?.facts?.model !== name || worker.state === 'refused') continue;
    for (const { name: other, isAdapter } of worker.facts.otherNames ?? []) {
      const known = others.get(other);
      if (known === undefined && others.size >= mostNames) continue;
      const among = known?.among ?? new Set();
      among.add(worker.record.name);
      others.set(other, { name: other, isAdapter: isAdapter || known?.isAdapter === true, among });
    }
  }
  return [...others.values()];
}

/** The model with its other names of now: they change without its texts. */
export function named<M extends { readonly text: LoadedText }>(model: M, others: OtherNames): M {
  if (others.length === 0) return model;
  const otherNames = others.map(({ name, isAdapter }) => ({ name, isAdapter }));
  return { ...model, text: { ...model.text, model: { ...model.text.model, otherNames } } };
}

export const isAlike = (some: OtherNames, others: OtherNames): boolean => textOf(some) === textOf(others);

const textOf = (others: OtherNames): string => others.map(({ name, isAdapter }) => `${isAdapter} ${name}`).join('\n');
