/** A group of the system, by its name or number: who may use a cache node besides its own user. */
import { readFileSync } from 'node:fs';
import { KvError } from '@kvtier/errors';
import * as z from 'zod';

/** The number behind it stands for "none". */
const mostGroup = 2 ** 32 - 2;

export const groupSchema = z
  .union([z.string().regex(/^[^:\s]{1,64}$/, 'is no name of a group'), z.number().int().min(0).max(mostGroup)])
  .nullable()
  .default(null);

/** Its number, which may be written as text, too: so the connectors' options take it. @throws KvError CONFIG when the system knows no group of that name */
export function readGroup(group: string | number | null, file = '/etc/group'): number | null {
  if (typeof group !== 'string') return group;
  if (/^\d{1,10}$/.test(group) && Number(group) <= mostGroup) return Number(group);
  const lines = readFileSync(file, 'utf8').split('\n');
  const found = lines.map((line) => line.split(':')).find(([name]) => name === group);
  if (found) return Number(found[2]);
  throw new KvError('CONFIG', `group: ${file} has no group "${group}"; write its number, which containers share`);
}
