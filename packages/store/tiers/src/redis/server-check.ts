/** Can a server hold its share of the budget? From INFO memory. More than its maxmemory is KvError CONFIG. */
import { KvError } from '@kvtier/errors';
import type { Partition, RedisCommands } from './redis-commands.ts';
import type { RedisSettings } from './settings.ts';

/** The server of this partition, which may have others of `all`. Returns a warning, or "". */
export async function checkServer(
  commands: RedisCommands,
  partition: Partition,
  all: readonly Partition[],
  settings: RedisSettings,
): Promise<string> {
  const name = commands.address(partition)?.name ?? '';
  const info = String(await commands.command(partition, 'INFO', ['memory']));
  const maxBytes = Number(/^maxmemory:(\d+)/m.exec(info)?.[1] ?? 0);
  const policy = /^maxmemory_policy:(\S+)/m.exec(info)?.[1] ?? 'noeviction';
  const held = all.filter((each) => (commands.address(each)?.name ?? '') === name).length;
  const shareBytes = Math.floor((settings.bytes * held) / all.length);
  if (maxBytes === 0) return '';
  if (shareBytes > maxBytes) {
    throw new KvError(
      'CONFIG',
      `redis: ${shareBytes} bytes of budget at ${name}, whose maxmemory is ${maxBytes}; lower bytes or raise maxmemory`,
    );
  }
  return policy === 'noeviction' ? '' : `${name} has maxmemory-policy ${policy}; noeviction lets kvtier decide`;
}
