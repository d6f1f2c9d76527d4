/**
 * Named steps at which a test makes the node fail: KVTIER_FAULT="STEP:ACTION[:ARGUMENT]", several separated by commas.
 *
 *     store.commit.published:kill        SIGKILL to itself at the first pass
 *     store.commit.published:kill:3      at the third
 *     store.writedown.before:delay:500   stand still for 500 ms at every pass
 *     store.load.read:error              throw KvError IO at every pass
 *
 * Off, and without cost, unless the variable is set: call sites are `failpoint?.(step)`.
 */
import { KvError } from '@kvtier/errors';

export const failpointSteps = [
  'store.reserve.allocated',
  'store.commit.before',
  'store.commit.published',
  'store.writedown.before',
  'store.writedown.after',
  'store.load.read',
  'store.load.published',
  'store.close.before',
] as const;
export type FailpointStep = (typeof failpointSteps)[number];
export type Failpoint = (step: FailpointStep) => void;

interface Fault {
  readonly action: string;
  readonly argument: number;
  passes: number;
}

/** The failpoints that the environment asks for, undefined for none. KvError CONFIG for what is not understood. */
export function failpointFromEnv(env: Readonly<Record<string, string | undefined>>): Failpoint | undefined {
  if (!env.KVTIER_FAULT) return undefined;
  const faults = new Map<string, Fault>();
  for (const text of env.KVTIER_FAULT.split(',')) {
    const [step = '', action = '', argument = ''] = text.trim().split(':');
    const known = (failpointSteps as readonly string[]).includes(step);
    if (!known || !['kill', 'delay', 'error'].includes(action) || !/^\d*$/.test(argument)) {
      throw new KvError(
        'CONFIG',
        `KVTIER_FAULT: "${text}" is not STEP:kill|delay|error[:NUMBER]; steps: ${failpointSteps.join(' ')}`,
      );
    }
    faults.set(step, { action, argument: argument === '' ? 1 : Number(argument), passes: 0 });
  }
  return (step) => {
    const fault = faults.get(step);
    if (fault === undefined) return;
    fault.passes++;
    if (fault.action === 'error') throw new KvError('IO', `fault injected at ${step} by KVTIER_FAULT; unset it`);
    if (fault.action === 'delay') Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, fault.argument);
    else if (fault.passes === fault.argument) process.kill(process.pid, 'SIGKILL');
  };
}
