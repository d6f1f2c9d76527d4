/**
 * Our version: that of package.json (tested in test/style). A source of its own, so that it is in every bundle, and a bundle of another
 * version is never taken for a current one (bundles.ts looks at sources alone).
 */
export const version = '0.1.0';
