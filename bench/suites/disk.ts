/** The disk tier's rates alone, at the sizes of block that engines have most: a part of `nvme`, under the name of the tier. */
import { argumentsOf } from '../arguments.ts';
import type { Suite } from '../figures.ts';
import nvme, { labels } from './nvme.ts';

const sizes = ['64k', '1m', '4m'];

const suite: Suite = {
  ...nvme,
  name: 'disk',
  description:
    'the disk tier: payload rates and CPU at 64 KiB, 1 MiB and 4 MiB beside fio on the same files (part of nvme)',
  async run(context) {
    const { words } = argumentsOf('disk', context.args, { words: labels });
    return nvme.run({ ...context, args: words.length === 0 ? sizes : words });
  },
};
export default suite;
