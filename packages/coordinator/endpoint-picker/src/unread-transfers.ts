/**
 * Whether a body that was not read may tell pods where blocks come from or go to: by its bytes, so that one that only speaks of it counts,
 * too. Of one that was read its members are looked at (`BodyFacts.whyNoTransfer`).
 */

/** Of all such members. */
const words = ['transfer_params', 'kv_hint', 'bootstrap_'];
/** By which names can be written in other letters: escapes, and more bytes than one for a letter. */
const disguises = ['\\u', '\0'];

/** `isOdd`: it is none that we can read, and a pod may read it all the same. */
export const mayTellTransfers = (body: Buffer, isOdd: boolean): boolean =>
  [...words, ...(isOdd ? disguises : [])].some((word) => body.includes(word));

export const whyNotUnread = 'A body that cannot be read here may tell pods no transfer of blocks. Leave it out';
