import { describe, expect, it } from 'vitest';
import { SteadyWall } from './clock.ts';

describe('the wall clock', () => {
  const day = 86_400_000;
  const rig = (): { wall: SteadyWall; steady: number; step: number } => {
    const at = { steady: 5, step: 1_000_000 } as { wall: SteadyWall; steady: number; step: number };
    at.wall = new SteadyWall(
      () => at.steady + at.step,
      () => at.steady,
    );
    return at;
  };

  it('does not follow one who sets it for a moment', () => {
    const at = rig();
    at.step += 40 * day;
    at.steady += 100;
    expect(at.wall.nowMs()).toBe(1_000_105);
    at.steady += 9_999;
    expect(at.wall.nowMs()).toBe(1_010_104);
    at.step -= 40 * day;
    at.steady += 1;
    expect(at.wall.nowMs()).toBe(1_010_105);
  });

  it('believes what has stayed for ten seconds, and counts anew when it is set once more', () => {
    const at = rig();
    at.step += day;
    at.wall.nowMs();
    at.steady += 9_000;
    at.step += day;
    at.wall.nowMs();
    at.steady += 9_000;
    expect(at.wall.nowMs()).toBe(1_018_005);
    at.steady += 1_000;
    expect(at.wall.nowMs()).toBe(1_019_005 + 2 * day);
  });

  it('follows small corrections at once', () => {
    const at = rig();
    at.step -= 900;
    expect(at.wall.nowMs()).toBe(999_105);
    at.step -= 900;
    expect(at.wall.nowMs()).toBe(998_205);
  });
});
