/**
 * Samples of this process's stack, taken all the time: one profile follows another without a gap, for all test files that run in it. V8's
 * profiler lists all code there is whenever a first profile begins: tenths of a second of CPU in a worker that has run many files.
 */
import { Session, console as toInspector } from 'node:inspector';
import type { Profile } from './turn-profile.ts';

const sampleUs = 2_000;

class Samples {
  readonly #session = new Session();
  #count = 0;
  #ended: Profile | undefined;

  constructor() {
    this.#session.connect();
    this.#session.on('Profiler.consoleProfileFinished', ({ params }) => {
      this.#ended = params.profile as Profile;
    });
    this.#post('Profiler.enable');
    this.#post('Profiler.setSamplingInterval', { interval: sampleUs });
    toInspector.profile(this.#name(0));
  }

  take(): Profile {
    toInspector.profile(this.#name(this.#count + 1)); // before the other one ends: so there is always one
    toInspector.profileEnd(this.#name(this.#count));
    this.#count++;
    const profile = this.#ended;
    this.#ended = undefined;
    if (profile === undefined) throw new Error('V8’s profiler told nothing of a profile that has ended');
    return profile;
  }

  #name(nth: number): string {
    return `turns ${nth}`;
  }

  #post(method: string, params: object = {}): void {
    this.#session.post(method, params, (error) => {
      if (error) throw error;
    });
  }
}

/** A test that resets modules has this one loaded again, and its samples go on. */
const ofProcess = globalThis as { kvtierTurnSamples?: Samples };

/** What was sampled since the last call, or since the process began to. */
export function takeSamples(): Profile {
  ofProcess.kvtierTurnSamples ??= new Samples();
  return ofProcess.kvtierTurnSamples.take();
}
