/** For tests: doubles, rigs and what else of this tier they look at. */
export { DeviceFiles } from '../device-files.ts';
export { DiskIndex } from '../disk-index.ts';
export { DiskIo, identitiesOf, type ObjectRow } from '../disk-io.ts';
export { Segment } from '../segment.ts';
