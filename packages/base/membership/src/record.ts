/**
 * A member's record, as the list has it: text that somebody wrote. Fields that only newer members know are left out; everything else has
 * to be as the schemas say.
 */
import {
  eventSourceSchema,
  type NodeRecord,
  nodeRecordSchema,
  type WorkerRecord,
  workerRecordSchema,
} from '@kvtier/config';
import type { Listed } from './member-list.ts';

export type Parsed = { readonly worker: WorkerRecord } | { readonly node: NodeRecord } | undefined;

const events = eventSourceSchema.strip().nullable().default(null);
const workerSchema = workerRecordSchema.extend({ events }).strip();
const nodeSchema = nodeRecordSchema
  .extend({ events, peer: nodeRecordSchema.shape.peer.unwrap().unwrap().strip().nullable().default(null) })
  .strip();

/** `why`: it is none. */
export function parseRecord({ id, text }: Pick<Listed, 'id' | 'text'>): { parsed: Parsed; why?: string } {
  const no = (why: string) => ({ parsed: undefined, why });
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    return no('it is no JSON');
  }
  const [kind, name] = [id.slice(0, id.indexOf(':')), id.slice(id.indexOf(':') + 1)];
  if (kind !== 'worker' && kind !== 'node') return no('it is neither a worker nor a node');
  const worker = kind === 'worker' ? workerSchema.safeParse(value) : undefined;
  const node = kind === 'node' ? nodeSchema.safeParse(value) : undefined;
  const issue = (worker ?? node)?.error?.issues[0];
  if (issue !== undefined) return no(`${issue.path.join('.') || 'the record'}: ${issue.message}`);
  if ((worker ?? node)?.data?.name !== name) return no('its name is another one');
  return { parsed: worker?.data === undefined ? { node: node!.data! } : { worker: worker.data } };
}
