/**
 * Which device of the disk tier a write goes to. All devices are to turn over at one rate, whatever their budgets and however little is
 * written: a block that goes early from a small device, or from the one that always comes first, cuts the chain that lies on the others.
 *
 *     batch ──4 MiB──▶ of those with about the least to do: the one whose budget was written over the fewest times
 *
 * A device begins with what it holds, also when it comes back: one that is empty is filled before blocks go from another that is full.
 * What a device did not get because it is slow is made up for, up to one budget.
 */
import type { WriteJob } from './appender.ts';
import type { Segment } from './segment.ts';

/** What is asked of a device. */
export interface StripedDevice {
  /** In the tier, from 0. */
  readonly number: number;
  readonly capacityBytes: number;
  readonly segments: Iterable<Pick<Segment, 'state' | 'tail'>>;
  accepts(objectBytes: number): boolean;
  /** Asked only of one that accepts. */
  readonly appender: {
    readonly pendingBytes: number;
    hasRoom(bytes: number): boolean;
    append(jobs: readonly WriteJob[]): void;
  };
}

/** So much of a batch goes to one device before the next one gets its turn: far above the size of one I/O. */
export const stripeBytes = 4 << 20;
/** So much more may wait for one device than for another that gets less than its share: some milliseconds of writing. */
const slackBytes = 8 * stripeBytes;

export class Stripes {
  readonly #devices: readonly StripedDevice[];
  /** How often its budget was written over, by number of the device: what it held at first counts. */
  readonly #turns: Float64Array;

  constructor(devices: readonly StripedDevice[]) {
    this.#devices = devices;
    this.#turns = Float64Array.from(devices, shareHeld);
  }

  /** This device is in service again, perhaps with less than it held before. */
  back(device: StripedDevice): void {
    const fullTurns = Math.max(1, ...this.#turns) - 1;
    this.#turns[device.number] = fullTurns + shareHeld(device);
  }

  /** Of jobs that come together; all of it in one turn. */
  batch(): StripedBatch {
    return new StripedBatch(this.#devices, this.#turns);
  }
}

function shareHeld({ segments, capacityBytes }: StripedDevice): number {
  let bytes = 0;
  for (const { state, tail } of segments) if (state !== 'free') bytes += tail;
  return bytes / capacityBytes;
}

export class StripedBatch {
  readonly #loads: readonly { readonly device: StripedDevice; readonly jobs: WriteJob[]; bytes: number }[];
  readonly #turns: Float64Array;
  #current = -1;
  #leftBytes = 0;

  constructor(devices: readonly StripedDevice[], turns: Float64Array) {
    this.#loads = devices.map((device) => ({ device, jobs: [], bytes: 0 }));
    this.#turns = turns;
  }

  /** Where the next object of so many bytes goes; undefined: nowhere. */
  jobsFor(bytes: number): WriteJob[] | undefined {
    if (this.#leftBytes <= 0 || !this.#takes(this.#current, bytes)) {
      this.#current = this.#choose(bytes);
      this.#leftBytes = stripeBytes;
    }
    const load = this.#loads[this.#current];
    if (load === undefined) return undefined;
    load.bytes += bytes;
    this.#leftBytes -= bytes;
    this.#turns[this.#current]! += bytes / load.device.capacityBytes;
    return load.jobs;
  }

  submit(): void {
    for (const { device, jobs } of this.#loads) if (jobs.length > 0) device.appender.append(jobs);
  }

  #takes(number: number, bytes: number): boolean {
    const load = this.#loads[number];
    return load?.device.accepts(bytes) === true && load.device.appender.hasRoom(load.bytes + bytes);
  }

  /** -1: none takes it. */
  #choose(bytes: number): number {
    const takers = [...this.#loads.keys()].filter((number) => this.#takes(number, bytes));
    if (takers.length < 2) return takers[0] ?? -1;
    const waiting = takers.map((number) => {
      const { device, bytes: added } = this.#loads[number]!;
      return device.appender.pendingBytes + added;
    });
    const most = Math.min(...waiting) + slackBytes;
    const turns = this.#turns;
    const longest = Math.max(...turns);
    let choice = -1;
    for (const [at, number] of takers.entries()) {
      turns[number] = Math.max(turns[number]!, longest - 1);
      if (waiting[at]! <= most && (choice === -1 || turns[number]! < turns[choice]!)) choice = number;
    }
    return choice;
  }
}
