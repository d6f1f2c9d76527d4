/** The list of a cluster's members in Redis: members keep up their own records, coordinators and cache nodes read them all. */
export { type Announced, type AnnounceOptions, announceNode, announceWorker } from './announcer.ts';
export { checkList } from './check-list.ts';
export { announcedEvents, type PublishedEvents } from './published-events.ts';
export { MemberReader, type MemberReaderOptions } from './reader.ts';
