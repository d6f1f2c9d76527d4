/** The machine's clock, the same in all processes: microseconds, modulo 2^31. */
const most = 2 ** 31;

export const stamp = (): number => Number((process.hrtime.bigint() / 1_000n) % BigInt(most));

/** Microseconds since a stamp. */
export const since = (stamped: number): number => (stamp() - stamped + most) % most;
