/** Can these servers hold the budget? From INFO memory. A budget above their maxmemory is KvError CONFIG. */
import { KvError } from '@kvtier/errors';
import type { Partition, RedisCommands } from './redis-commands.ts';
import type { RedisSettings } from './settings.ts';

/** Returns a warning, or "". */
export async function checkServers(
  commands: RedisCommands,
  partitions: readonly Partition[],
  settings: RedisSettings,
): Promise<string> {
  // Partitions by server: each holds its share of the budget.
  const servers = new Map<string, Partition[]>();
  for (const partition of partitions) {
    const name = commands.address(partition)?.name ?? '';
    servers.set(name, [...(servers.get(name) ?? []), partition]);
  }
  let warning = '';
  for (const [name, held] of servers) {
    const info = String(await commands.command(held[0]!, 'INFO', ['memory']));
    const maxBytes = Number(/^maxmemory:(\d+)/m.exec(info)?.[1] ?? 0);
    const policy = /^maxmemory_policy:(\S+)/m.exec(info)?.[1] ?? 'noeviction';
    const shareBytes = Math.floor((settings.bytes * held.length) / partitions.length);
    if (maxBytes === 0) continue;
    if (shareBytes > maxBytes) {
      throw new KvError(
        'CONFIG',
        `redis: ${shareBytes} bytes of budget at ${name}, whose maxmemory is ${maxBytes}; lower bytes or raise maxmemory`,
      );
    }
    if (policy !== 'noeviction') warning = `${name} has maxmemory-policy ${policy}; noeviction lets kvtier decide`;
  }
  return warning;
}
