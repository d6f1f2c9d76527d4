/**
 * What a simulated Redis holds, and what its commands and our scripts do to it: the directory of one partition, and the values.
 * A model of scripts.ts, statement for statement; the Lua itself runs against real servers in redis-tier.slow.test.ts.
 *
 * Invariant: a command is done whole, in one turn.
 */

import { chargeOf, maxEvents, parseEntry, scripts } from '@kvtier/tiers/redis/testing';

export type Reply = Buffer | number | null | readonly Reply[];
interface Event {
  readonly number: number;
  readonly id: string;
  readonly fields: readonly string[];
}

/** What one partition's keys hold. */
export class Ledger {
  partitions = '';
  cap = 0;
  epoch = '';
  used = 0;
  count = 0;
  eventCount = 0;
  /** The clock of recency: where it was last, and how far the server's own was set back. */
  clockUs = 0;
  skewUs = 0;
  /** Entries that were none and are gone; what they were charged is not known. */
  lost = 0;
  /** When the last event was made. */
  atUs = 0;
  blocks = new Map<string, string>();
  recency = new Map<string, number>();
  leases = new Map<string, number>();
  expiry = new Map<string, number>();
  events: Event[] = [];
}

export interface State {
  ledger: Ledger | undefined;
  values: Map<string, Buffer>;
}

const isWell = (ledger: Ledger): boolean =>
  ledger.blocks.size === ledger.count && !Number.isNaN(ledger.used) && ledger.lost * 16 <= ledger.count + 16;

const bytes = (value: string): Buffer => Buffer.from(value, 'latin1');
/** Each is behind a byte with its length. */
function fieldsIn(text: string): string[] {
  const fields: string[] = [];
  for (let at = 0; at < text.length; ) {
    const end = at + 1 + text.charCodeAt(at);
    fields.push(text.slice(at + 1, end));
    at = end;
  }
  return fields;
}
const leaseOf = (part: string, words: string, fields: string): string => `${part} ${words}\n${fields}`;
const partsOf = (length: number, part: number): number => Math.ceil(length / part);

/** A value's key, and the bytes that belong into it. */
interface Part {
  readonly key: string;
  readonly length: number;
  readonly value?: Buffer | undefined;
}

const partsIn = (base: string, length: number, part: number, id: string): Part[] =>
  Array.from({ length: partsOf(length, part) }, (_, i) => {
    return { key: `${base}v:${id}:${i}`, length: Math.min(part, length - i * part) };
  });

export class RedisKeys {
  #state: State = { ledger: undefined, values: new Map() };
  #server = 0;
  readonly #nowUs: () => number;
  /** Asked before a script writes: true, and it is refused. */
  readonly #refuses: () => boolean;

  /** `nowUs`: the server's own clock. */
  constructor(nowUs: () => number, refuses: () => boolean) {
    this.#nowUs = nowUs;
    this.#refuses = refuses;
  }

  get ledger(): Ledger | undefined {
    return this.#state.ledger;
  }

  get values(): Map<string, Buffer> {
    return this.#state.values;
  }

  /** What a replica has that has got everything. */
  copy(): State {
    const { ledger, values } = this.#state;
    return { ledger: ledger === undefined ? undefined : copyOf(ledger), values: new Map(values) };
  }

  /** Another server takes over, with that. */
  restore(state: State): void {
    this.#server++;
    this.#state = state;
  }

  /** Somebody else writes into our keys. */
  scribble(what: 'entry' | 'event' | 'lease' | 'number' | 'name', nonsense: string, at: number): void {
    const { ledger } = this.#state;
    if (ledger === undefined) return;
    const field = [...ledger.blocks.keys()][at];
    if (what === 'entry' && field !== undefined) ledger.blocks.set(field, nonsense);
    if (what === 'lease') ledger.leases.set(nonsense, at);
    if (what === 'number' && at === 0) ledger.used = Number.NaN;
    if (what === 'name' && at === 0) ledger.blocks.set(`stranger ${nonsense}`, nonsense);
    if (what === 'event') {
      const number = (ledger.events.at(-1)?.number ?? 0) + at;
      if (at > 0) ledger.events.push({ number, id: `${number}-1`, fields: ['foo', nonsense] });
    }
  }

  run(name: string, args: readonly string[]): Reply | Error {
    switch (name) {
      case 'TIME':
        return [bytes(String(Math.floor(this.#nowUs() / 1e6))), bytes(String(Math.floor(this.#nowUs() % 1e6)))];
      case 'INFO':
        return bytes('maxmemory:0\r\nmaxmemory_policy:noeviction\r\n');
      case 'SCRIPT':
        return bytes('ok');
      case 'SCAN':
        return [bytes('0'), [...this.#state.values.keys()].map(bytes)];
      case 'EVALSHA':
        return this.#script(args[0]!, args[2]!.slice(0, -6), args.slice(2 + Number(args[1])));
      default:
        return new Error(`ERR simulation: no command ${name}`);
    }
  }

  #script(sha: string, base: string, argv: readonly string[]): Reply | Error {
    if (sha === scripts.resetScript.sha) {
      if ((this.#state.ledger?.epoch ?? '') !== argv[0]) return 0;
      this.#state.ledger = undefined;
      return 6;
    }
    if (sha === scripts.orphansScript.sha) {
      if (this.#state.ledger !== undefined) return 0;
      for (const key of argv) this.#state.values.delete(key);
      return 1;
    }
    if (sha === scripts.lookScript.sha) return [bytes(this.#state.ledger === undefined ? 'new' : 'ok')];
    if (sha === scripts.openScript.sha) return this.#open(base, argv);
    const { ledger } = this.#state;
    if (ledger === undefined || !isWell(ledger)) return new Error('KVTIER lost');
    if (sha === scripts.clockScript.sha) return [this.#stateOf(ledger)];
    if (sha === scripts.pageScript.sha) {
      const entries = [...ledger.blocks].flatMap(([field, entry]) => [bytes(field), bytes(entry)]);
      return [this.#stateOf(ledger), bytes(String(this.#server)), bytes('0'), entries];
    }
    const writes = sha !== scripts.pollScript.sha;
    if (writes && this.#refuses()) {
      return new Error('OOM command not allowed when used memory > maxmemory');
    }
    if (sha === scripts.reserveScript.sha) return this.#reserve(ledger, base, argv);
    if (sha === scripts.commitScript.sha) return this.#commit(ledger, base, argv);
    if (sha === scripts.removeScript.sha) {
      for (let at = 1; at < argv.length; at += 2) {
        if (ledger.blocks.get(argv[at]!) === argv[at + 1]) this.#drop(ledger, base, argv[at]!, argv[0]!);
      }
      return [this.#stateOf(ledger)];
    }
    if (sha === scripts.touchScript.sha) {
      for (let at = 0; at < argv.length; at += 2) {
        if (ledger.blocks.has(argv[at]!)) this.#use(ledger, argv[at]!, Number(argv[at + 1]));
      }
      return [this.#stateOf(ledger)];
    }
    this.#sweep(ledger, base, argv[0]!);
    const first = ledger.events[0]?.number ?? 0;
    const news = ledger.events
      .filter(({ number }) => number > Number(argv[1]) && number <= ledger.eventCount)
      .slice(0, Number(argv[2]));
    return [
      this.#stateOf(ledger),
      first,
      bytes(ledger.events.find(({ number }) => number === Number(argv[1]))?.id ?? ''),
      news.map(({ id, fields }) => [bytes(id), fields.map(bytes)]),
    ];
  }

  #open(base: string, [partitions, cap, epoch, create]: readonly string[]): Reply {
    let { ledger } = this.#state;
    if (ledger === undefined) {
      if (create === '') return [bytes('new'), bytes('')];
      ledger = new Ledger();
      Object.assign(ledger, { partitions, epoch });
      this.#state.ledger = ledger;
    } else if (!isWell(ledger) || ledger.recency.size !== ledger.count) {
      return [bytes('damaged'), bytes(ledger.epoch)];
    }
    ledger.cap = Number(cap);
    while (ledger.used > ledger.cap && ledger.blocks.size > 0) this.#drop(ledger, base, oldest(ledger)!, '');
    return [
      bytes('ok'),
      this.#stateOf(ledger),
      bytes(ledger.events.find(({ number }) => number === ledger.eventCount)?.id ?? ''),
    ];
  }

  #reserve(ledger: Ledger, base: string, argv: readonly string[]): Reply {
    const [node, leaseMs, part, share, fields, list] = argv;
    this.#sweep(ledger, base, node!);
    const words = list!.split(' ');
    let answers = '';
    const held: Buffer[] = [];
    const evicted: string[] = [];
    const entries: string[] = [];
    const taken: { readonly words: string; readonly name: string }[] = [];
    const made: Part[] = [];
    const freed: Part[] = [];
    for (const field of fieldsIn(fields!)) {
      const entry = ledger.blocks.get(field);
      if (entry !== undefined && parseEntry(entry) === undefined) this.#drop(ledger, base, field, node!);
    }
    for (const [i, field] of fieldsIn(fields!).entries()) {
      const [id, length] = [words[2 * i]!, Number(words[2 * i + 1])];
      const other = ledger.blocks.get(field);
      const need = chargeOf(length, Number(part));
      if (other !== undefined) {
        this.#use(ledger, field, this.#clockUs(ledger));
        answers += 'h';
        held.push(bytes(other));
        continue;
      }
      let fits = need <= ledger.cap && (share === '' || need <= Number(share));
      while (fits && ledger.used + need > ledger.cap) {
        const victim = oldest(ledger);
        if (victim === undefined) fits = false;
        else {
          const entry = ledger.blocks.get(victim)!;
          freed.push(...this.#drop(ledger, base, victim, node!));
          evicted.push(String.fromCharCode(victim.length), victim);
          entries.push(parseEntry(entry) === undefined ? '-' : entry);
        }
      }
      answers += fits ? 'r' : 'n';
      if (!fits) continue;
      ledger.used += need;
      taken.push({ words: `${id} ${length}`, name: String.fromCharCode(field.length) + field });
      made.push(...partsIn(base, length, Number(part), id));
    }
    if (taken.length > 0) {
      const [list, names] = [taken.map(({ words }) => words).join(' '), taken.map(({ name }) => name).join('')];
      ledger.leases.set(leaseOf(part!, list, names), this.#clockUs(ledger) / 1000 + Number(leaseMs));
    }
    // Keys of what was evicted are renamed, with what is in them, where that is no more than what will be.
    for (const [i, { key, length }] of made.entries()) {
      const old = freed[i];
      this.#state.values.set(
        key,
        (old !== undefined && old.length <= length ? old.value : undefined) ?? Buffer.alloc(0),
      );
    }
    return [this.#stateOf(ledger), bytes(answers), held, bytes(evicted.join('')), bytes(entries.join('\n'))];
  }

  #commit(ledger: Ledger, base: string, argv: readonly string[]): Reply {
    const [node, ttls, part, fields, list, flags, times] = argv;
    const names = fieldsIn(fields!);
    if (!ledger.leases.delete(leaseOf(part!, list!, fields!))) {
      return [this.#stateOf(ledger), bytes('n'.repeat(names.length)), []];
    }
    const words = list!.split(' ');
    const uses = times!.split(' ');
    const lives = ttls!.split(' ');
    let answers = '';
    const others: Buffer[] = [];
    for (const [i, field] of names.entries()) {
      const [id, length] = words.slice(2 * i, 2 * i + 2) as [string, string];
      const held = ledger.blocks.get(field);
      let answer = 'n';
      if (flags![i] === '0' || held !== undefined) {
        this.#dropReserved(ledger, base, Number(length), Number(part), id);
        if (flags![i] === '1') {
          answer = 'h';
          others.push(bytes(held!));
        }
      } else {
        const entry = `${length} ${part} ${id}`;
        ledger.blocks.set(field, entry);
        ledger.count++;
        this.#use(ledger, field, Number(uses[i]));
        const ttlMs = Number(lives[i] || '-'); // Lua's tonumber: neither '' nor '-' is one
        if (!Number.isNaN(ttlMs)) ledger.expiry.set(field, this.#nowUs() / 1000 + ttlMs);
        this.#tell(ledger, 's', field, entry, node!);
        answer = 's';
      }
      answers += answer;
    }
    return [this.#stateOf(ledger), bytes(answers), others];
  }

  #stateOf(ledger: Ledger): Reply[] {
    return [bytes(ledger.epoch), ledger.used, ledger.cap, ledger.eventCount, this.#clockUs(ledger), ledger.atUs];
  }

  /** Goes on where the server's own clock is set back. */
  #clockUs(ledger: Ledger): number {
    const nowUs = Math.floor(this.#nowUs());
    if (nowUs + ledger.skewUs < ledger.clockUs) ledger.skewUs = ledger.clockUs - nowUs;
    ledger.clockUs = nowUs + ledger.skewUs;
    return ledger.clockUs;
  }

  #use(ledger: Ledger, field: string, usedUs: number): void {
    const used = Math.min(usedUs, this.#clockUs(ledger) + 1_000_000);
    ledger.recency.set(field, Math.max(ledger.recency.get(field) ?? 0, used));
  }

  #sweep(ledger: Ledger, base: string, node: string): void {
    const nowMs = this.#nowUs() / 1000;
    const leaseMs = this.#clockUs(ledger) / 1000;
    for (const [member, ends] of [...ledger.leases]) if (ends <= leaseMs) this.#endLease(ledger, base, member);
    for (const [field, ends] of [...ledger.expiry]) {
      if (ends > nowMs) continue;
      if (ledger.blocks.has(field)) this.#drop(ledger, base, field, node);
      else ledger.expiry.delete(field);
    }
  }

  #endLease(ledger: Ledger, base: string, lease: string): void {
    ledger.leases.delete(lease);
    const [part, ...words] = lease.slice(0, Math.max(0, lease.indexOf('\n'))).split(' ');
    for (let i = 0; i < words.length; i += 2) {
      this.#dropReserved(ledger, base, Number(words[i + 1]), Number(part), words[i]!);
    }
  }

  #dropReserved(ledger: Ledger, base: string, length: number, part: number, id: string): void {
    this.#dropValue(base, length, part, id);
    ledger.used -= chargeOf(length, part);
  }

  /** What was in its keys. */
  #drop(ledger: Ledger, base: string, field: string, node: string): Part[] {
    const entry = ledger.blocks.get(field)!;
    ledger.blocks.delete(field);
    ledger.recency.delete(field);
    ledger.expiry.delete(field);
    ledger.count--;
    const parsed = parseEntry(entry);
    if (parsed === undefined) {
      ledger.lost++;
      this.#tell(ledger, 'r', field, '-', node);
      return [];
    }
    const { bytes: length, partBytes: part, id } = parsed;
    const freed = this.#dropValue(base, length, part, id);
    ledger.used -= chargeOf(length, part);
    this.#tell(ledger, 'r', field, entry, node);
    return freed;
  }

  #dropValue(base: string, length: number, part: number, id: string): Part[] {
    const parts = partsIn(base, length, part, id).map((each) => ({ ...each, value: this.#state.values.get(each.key) }));
    for (const { key } of parts) this.#state.values.delete(key);
    return parts;
  }

  #tell(ledger: Ledger, kind: string, field: string, entry: string, node: string): void {
    const number = ++ledger.eventCount;
    // A stream that others have written to takes no smaller number: it begins anew.
    if ((ledger.events.at(-1)?.number ?? 0) >= number) ledger.events = [];
    ledger.atUs = this.#clockUs(ledger);
    const id = `${number}-${ledger.atUs}`;
    ledger.events.push({
      number,
      id,
      fields: ['n', node, kind, String.fromCharCode(field.length) + field, 'e', entry],
    });
    if (ledger.events.length > Math.min(maxEvents, 200)) ledger.events.shift();
  }
}

function oldest(ledger: Ledger): string | undefined {
  let found: string | undefined;
  let usedUs = Number.POSITIVE_INFINITY;
  for (const [field, used] of ledger.recency) {
    if (used < usedUs) [found, usedUs] = [field, used];
  }
  return found;
}

function copyOf(ledger: Ledger): Ledger {
  const copy = Object.assign(new Ledger(), ledger);
  for (const name of ['blocks', 'recency', 'leases', 'expiry'] as const) {
    Object.assign(copy, { [name]: new Map<string, unknown>(ledger[name]) });
  }
  copy.events = [...ledger.events];
  return copy;
}
