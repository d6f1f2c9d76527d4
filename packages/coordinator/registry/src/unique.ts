/**
 * Members as a discovery may tell them: each name and each worker's address once. Of two that have one in common the one stays that was
 * told before, as long as it is there: a newcomer, by mistake or meaning ill, takes nothing from a worker that serves. Of newcomers it is
 * the first by name, so that coordinators that begin together keep the same one. The other is ignored, which is one line as long as it
 * lasts.
 */
import { type Membership, maxMembers, type NodeRecord, type WorkerRecord } from '@kvtier/config';
import type { Log } from '@kvtier/runtime';

export class UniqueMembers {
  readonly #log: Log;
  /** What was said of those that are ignored now. */
  #said = new Set<string>();
  /** Who was told last, by what makes it the same member. */
  #told = new Set<string>();

  constructor(log: Log) {
    this.#log = log;
  }

  of(members: Membership): Membership {
    const said = new Set<string>();
    const ignore = (member: string, reason: string): boolean => {
      const line = `${member}: ${reason}`;
      if (!this.#said.has(line)) this.#log.warn({ member, reason }, 'a member is ignored');
      said.add(line);
      return false;
    };
    const [names, addresses, nodeNames] = [new Set<string>(), new Map<string, string>(), new Set<string>()];
    let room = maxMembers;
    const hasRoom = (member: string): boolean =>
      room-- > 0 || ignore(member, `there are more than ${maxMembers} members; split the cluster`);
    const isFirst = ({ name, address }: WorkerRecord): boolean => {
      const member = `worker ${name}`;
      if (names.has(name)) return ignore(member, 'there is another of this name; give each worker a name of its own');
      const other = addresses.get(address);
      if (other !== undefined) return ignore(member, `it has the address of worker ${other} (${address})`);
      if (!hasRoom(member)) return false;
      names.add(name);
      addresses.set(address, name);
      return true;
    };
    const isFirstNode = ({ name }: NodeRecord): boolean => {
      const member = `node ${name}`;
      if (nodeNames.has(name)) return ignore(member, 'there is another of this name; give each node a name of its own');
      if (!hasRoom(member)) return false;
      nodeNames.add(name);
      return true;
    };
    const workers = sorted(this.#oldFirst(members.workers, workerKey).filter(isFirst));
    const nodes = sorted(this.#oldFirst(members.nodes, nodeKey).filter(isFirstNode));
    this.#said = said;
    this.#told = new Set([...workers.map(workerKey), ...nodes.map(nodeKey)]);
    return { workers, nodes };
  }

  /** Those that were told last, then the others; each by name. */
  #oldFirst<T extends { readonly name: string }>(records: readonly T[], keyOf: (record: T) => string): T[] {
    const byName = sorted(records);
    const isOld = (record: T): boolean => this.#told.has(keyOf(record));
    return [...byName.filter(isOld), ...byName.filter((record) => !isOld(record))];
  }
}

const workerKey = ({ name, kind, address }: WorkerRecord): string => `worker ${name} ${kind} ${address}`;
const nodeKey = ({ name, peer }: NodeRecord): string => `node ${name} ${JSON.stringify(peer)}`;

const sorted = <T extends { readonly name: string }>(records: readonly T[]): T[] =>
  [...records].sort((a, b) => (a.name < b.name ? -1 : a.name > b.name ? 1 : 0));

/** Whether nothing has changed that a listener could see. */
export const isSameMembership = (a: Membership, b: Membership): boolean =>
  isSameList(a.workers, b.workers) && isSameList(a.nodes, b.nodes);

const isSameList = (a: readonly object[], b: readonly object[]): boolean =>
  a.length === b.length && a.every((each, i) => each === b[i] || JSON.stringify(each) === JSON.stringify(b[i]));
