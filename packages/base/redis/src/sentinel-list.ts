/**
 * The Sentinels that ioredis asks and listens to. It only ever adds to those that it was given: each that was replaced would be asked, and
 * waited for, for good, and take the place of one that lives among those that it listens to. So those go that nobody names any more as one
 * that it reaches. One Sentinel alone does not decide that: it may have lost sight of one that lives. Who does not answer names nobody.
 */
import type { Redis } from 'ioredis';

export interface Place {
  readonly host: string;
  readonly port: number;
}

export const placeOf = ({ host, port }: Place): string => `${host}:${port}`;

/** Of ioredis's connector. */
export interface Listing {
  sentinelIterator: { readonly sentinels: Place[]; cursor: number; add(sentinel: Place): boolean };
  updateSentinels(client: Redis): Promise<void>;
}

export class SentinelList {
  readonly #connector: Listing;
  readonly #onGone: (place: string) => void;
  readonly #update: Listing['updateSentinels'];
  readonly #given: readonly string[];
  /** Whom each named when it was asked last. */
  readonly #named = new Map<string, ReadonlySet<string>>();
  /** Where each was when it was asked last. */
  readonly #addresses = new Map<string, string>();

  /** From now on they go by themselves; `onGone` hears which. */
  constructor(connector: Listing, onGone: (place: string) => void) {
    this.#connector = connector;
    this.#onGone = onGone;
    this.#update = connector.updateSentinels;
    this.#given = connector.sentinelIterator.sentinels.map(placeOf);
    connector.updateSentinels = (client) => this.#updated(client);
  }

  /** The same for two names of one Sentinel: those that we are given are not those by which the others know it. */
  identityOf(sentinel: Place): string {
    return this.#addresses.get(placeOf(sentinel)) ?? placeOf(sentinel);
  }

  /** It did not answer, or its connection ended: whom it named it may not name any more. */
  failed(sentinel: Place): void {
    this.#named.delete(placeOf(sentinel));
  }

  async #updated(client: Redis): Promise<void> {
    const list = this.#connector.sentinelIterator;
    const asked = placeOf({ host: client.options.host!, port: client.options.port! });
    const { remoteAddress, remotePort } = client.stream;
    if (remoteAddress !== undefined) this.#addresses.set(asked, `${remoteAddress}:${remotePort}`);
    const before = [...list.sentinels];
    const named = new Set<string>();
    const add = (sentinel: Place): boolean => {
      named.add(placeOf(sentinel));
      return list.add(sentinel);
    };
    const noting: Listing = Object.create(this.#connector, { sentinelIterator: { value: { add } } });
    await this.#update.call(noting, client);
    // It may have gone meanwhile, by what another one said.
    if (!this.#given.includes(asked) && !list.sentinels.some((one) => placeOf(one) === asked)) return;
    this.#named.set(asked, named);
    const kept = new Set([...this.#given, asked]);
    for (const places of this.#named.values()) for (const place of places) kept.add(place);
    // What others added meanwhile stays.
    for (const sentinel of before.filter((one) => !kept.has(placeOf(one)))) this.#remove(sentinel);
  }

  #remove(sentinel: Place): void {
    const list = this.#connector.sentinelIterator;
    const at = list.sentinels.indexOf(sentinel);
    if (at === -1) return;
    list.sentinels.splice(at, 1);
    if (at < list.cursor) list.cursor--;
    const place = placeOf(sentinel);
    this.#named.delete(place);
    this.#addresses.delete(place);
    this.#onGone(place);
  }
}
