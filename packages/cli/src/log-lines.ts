/** Turns the services' log lines (pino's JSON) into lines for a person; anything else passes with the service's name before it. */

const levels: Readonly<Record<number, string>> = {
  10: 'trace',
  20: 'debug',
  30: 'info',
  40: 'warn',
  50: 'error',
  60: 'fatal',
};
const maxLineChars = 4096;
/** Of a Date. */
const latestMs = 8.64e15;

export type LineFormatter = (service: string, line: string) => string;

/**
 * As the services wrote it, one JSON object a line; what is not JSON is wrapped, so that every line parses. Of several engines or nodes,
 * which all call themselves the same, "member" says which one it was.
 */
export const jsonLine: LineFormatter = (service, line) => {
  if (parse(line) === null) return JSON.stringify({ level: 50, time: Date.now(), name: service, msg: line });
  return /-\d+$/.test(service)
    ? `{"member":${JSON.stringify(service)}${line === '{}' ? '' : ','}${line.slice(1)}`
    : line;
};

export const humanLine: LineFormatter = (service, line) => {
  const entry = parse(line);
  if (!entry) return `[${service}] ${line.slice(0, maxLineChars)}`;
  const { level, time, pid: _pid, name: _name, hostname: _host, msg, ...rest } = entry;
  const details = Object.entries(rest).map(
    ([key, value]) => `${key}=${typeof value === 'string' ? value : JSON.stringify(value)}`,
  );
  const word = levels[Number(level)] ?? 'info';
  return `[${service}]${timeOf(time)} ${word}: ${[msg ?? '', ...details].join(' ').trim()}`.slice(0, maxLineChars);
};

/** Two outages are told apart by when they were. */
const timeOf = (time: unknown): string =>
  typeof time === 'number' && Math.abs(time) <= latestMs ? ` ${new Date(time).toISOString()}` : '';

function parse(line: string): Record<string, unknown> | null {
  if (!line.startsWith('{')) return null;
  try {
    const value: unknown = JSON.parse(line);
    return typeof value === 'object' && value !== null ? (value as Record<string, unknown>) : null;
  } catch {
    return null;
  }
}
