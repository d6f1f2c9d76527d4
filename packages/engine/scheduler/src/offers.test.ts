/** Each block that a request offers counts once, in whatever order its offers are answered, and however often they are made again. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { type Offer, Offers } from './offers.ts';

const oneEach = (from: number, to: number): number => Math.max(0, to - from);

/** Of ten blocks, none of them answered. */
function threeOffers() {
  const counts = { exported: 0, skipped: 0 };
  const offers = new Offers(counts);
  const [first, second] = [offers.begin(0, 4, oneEach), offers.begin(4, 8, oneEach)];
  return { counts, offers, first, second, third: offers.begin(8, 10, oneEach) };
}

it('what is answered counts when nothing before it can be lost any more', () => {
  const { counts, offers, first, second, third } = threeOffers();
  offers.answered(second, { heldEnd: 7, isDropped: true });
  offers.answered(third, { heldEnd: 8, isDropped: true });
  expect(counts).toEqual({ exported: 0, skipped: 0 });
  offers.answered(first, { heldEnd: 4, isDropped: false });
  expect(counts).toEqual({ exported: 7, skipped: 3 });
  expect(offers.end).toBe(10);
});

it('of an outage all offers are one round, and after three of them what is lost is lost', () => {
  const counts = { exported: 0, skipped: 0 };
  const offers = new Offers(counts);
  for (let round = 0; round < 3; round++) {
    const both = [offers.begin(0, 4, oneEach), offers.begin(4, 8, oneEach)];
    for (const offer of both.reverse()) {
      expect(offers.mayTakeBack(offer)).toBe(true);
      offers.takeBack(offer, offer.first);
      offers.answered(offer, { heldEnd: offer.first, isDropped: false });
    }
    expect(both.map(({ end }) => end)).toEqual([0, 0]);
  }
  const last = offers.begin(0, 8, oneEach);
  expect(offers.mayTakeBack(last)).toBe(false);
  offers.answered(last, { heldEnd: 2, isDropped: true });
  expect(counts).toEqual({ exported: 2, skipped: 6 });
});

it('what is offered again in part leaves what lies behind as it is, and gives up what it cuts off', () => {
  const { counts, offers, first, second, third } = threeOffers();
  expect([3, 4, 6, 8, 9, 10].map((most) => offers.wholeEnd(1, most))).toEqual([3, 4, 4, 8, 8, 10]);
  offers.answered(second, { heldEnd: 7, isDropped: true });
  offers.takeBack(first, 1, 6);
  expect([first, second, third].map(({ end }) => end)).toEqual([1, 1, 10]);
  const again = offers.begin(1, 6, oneEach);
  offers.answered(first, { heldEnd: 1, isDropped: false });
  expect(counts).toEqual({ exported: 1, skipped: 0 });
  offers.takeBack(again, 1, 3); // of its own, 3 to 5 are given up
  offers.answered(again, { heldEnd: 1, isDropped: false });
  offers.answered(offers.begin(1, 3, oneEach), { heldEnd: 3, isDropped: true });
  expect(counts).toEqual({ exported: 4, skipped: 4 });
  offers.answered(third, { heldEnd: 10, isDropped: true });
  expect(counts).toEqual({ exported: 6, skipped: 4 });
});

it('what is put off counts where nothing was offered again, and not before', () => {
  const counts = { exported: 0, skipped: 0 };
  const offers = new Offers(counts, true);
  offers.answered(offers.begin(0, 4, oneEach), { heldEnd: 3, isDropped: true });
  offers.answered(offers.begin(4, 8, oneEach), { heldEnd: 8, isDropped: true });
  offers.cut(3);
  const last = offers.begin(3, 9, oneEach);
  expect(counts).toEqual({ exported: 0, skipped: 0 });
  offers.putOffNoMore();
  expect(counts).toEqual({ exported: 3, skipped: 0 });
  offers.answered(last, { heldEnd: 7, isDropped: true });
  expect(counts).toEqual({ exported: 7, skipped: 2 });
});

it('each block counts once', () => {
  const piece = fc.record({ blocks: fc.integer({ min: 1, max: 5 }), answersFirst: fc.nat({ max: 3 }) });
  const [held, found] = [fc.nat({ max: 6 }), fc.nat({ max: 40 })];
  const answer = fc.record({ which: fc.nat(), held, isLost: fc.boolean(), found, room: fc.nat({ max: 12 }) });
  fc.assert(
    fc.property(
      fc.array(piece, { minLength: 1, maxLength: 8 }),
      fc.array(answer, { maxLength: 60 }),
      (pieces, answers) => {
        const total = pieces.reduce((sum, { blocks }) => sum + blocks, 0);
        const counts = { exported: 0, skipped: 0 };
        const offers = new Offers(counts);
        const open: { offer: Offer; length: number }[] = [];
        let [offered, wanted] = [0, 0];
        const begin = (end: number): void => {
          if (end > offered) open.push({ offer: offers.begin(offered, end, oneEach), length: end - offered });
          offered = Math.max(offered, end);
        };
        /** `isEnded`: what is lost is offered again at once, as far as it is there. */
        const next = (isEnded: boolean): void => {
          const none = { which: 0, held: 6, isLost: false, found: 0, room: 0 };
          const { which, held, isLost, found, room } = answers.pop() ?? none;
          const { offer, length } = open.splice(which % open.length, 1)[0]!;
          const heldEnd = offer.first + Math.min(held, length);
          let isAgain = isLost && heldEnd < offer.first + length && heldEnd < offer.end && offers.mayTakeBack(offer);
          if (isAgain && isEnded) {
            const there = Math.min(found, offers.openEnd);
            const most = Math.min(there, heldEnd + room);
            const end = most < there ? offers.wholeEnd(heldEnd, most) : most;
            isAgain = end > heldEnd;
            if (isAgain) offers.takeBack(offer, heldEnd, end);
            if (isAgain) open.push({ offer: offers.begin(heldEnd, end, oneEach), length: end - heldEnd });
          } else if (isAgain) {
            offers.takeBack(offer, heldEnd);
            offered = heldEnd;
          }
          offers.answered(offer, { heldEnd, isDropped: !isAgain });
        };
        for (const { blocks, answersFirst } of pieces) {
          wanted += blocks;
          begin(wanted);
          for (let i = 0; i < answersFirst && open.length > 0; i++) next(false);
        }
        begin(total);
        while (open.length > 0) next(true);
        expect(counts.exported + counts.skipped).toBe(total);
      },
    ),
    { numRuns: Number(process.env.KVTIER_PROPERTY_RUNS ?? 300) },
  );
});
