import { expect, it, vi } from 'vitest';
import { failpointFromEnv } from './failpoints.ts';

it('off unless asked for; nonsense is one clear line', () => {
  expect(failpointFromEnv({})).toBeUndefined();
  expect(failpointFromEnv({ KVTIER_FAULT: '' })).toBeUndefined();
  for (const text of [
    'x',
    'store.commit.before',
    'store.commit.before:explode',
    'nowhere:kill',
    'store.commit.before:kill:x',
  ]) {
    expect(() => failpointFromEnv({ KVTIER_FAULT: text })).toThrow(expect.objectContaining({ code: 'CONFIG' }));
  }
});

it('kills at the given pass, fails at every one, and only at its own step', () => {
  const kill = vi.spyOn(process, 'kill').mockReturnValue(true);
  try {
    const failpoint = failpointFromEnv({ KVTIER_FAULT: 'store.commit.before:kill:2, store.load.read:error' })!;
    failpoint('store.commit.before');
    failpoint('store.commit.published');
    expect(kill).not.toHaveBeenCalled();
    failpoint('store.commit.before');
    expect(kill.mock.calls).toEqual([[process.pid, 'SIGKILL']]);
    for (let pass = 0; pass < 2; pass++) {
      expect(() => failpoint('store.load.read')).toThrow(expect.objectContaining({ code: 'IO' }));
    }
  } finally {
    kill.mockRestore();
  }
});
