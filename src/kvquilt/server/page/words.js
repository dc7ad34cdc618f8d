/** Where two answers differ, word by word. */

const MOST = 2000; // words; the comparison takes the product of both numbers

const split = (text) => (text.match(/\s*\S+/g) ?? []).slice(0, MOST);

/** For each text its words with whether they stand in the other, too, in the same order. */
export function compared(left, right) {
  const a = split(left), b = split(right);
  const same = (i, j) => a[i].trim() === b[j].trim();
  // longest[i][j]: common words of a from i on and b from j on
  const longest = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      longest[i][j] = same(i, j) ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
  const marked = { left: a.map((word) => [word, false]), right: b.map((word) => [word, false]), shared: longest[0][0] };
  for (let i = 0, j = 0; i < a.length && j < b.length; ) {
    if (same(i, j)) {
      marked.left[i++][1] = true;
      marked.right[j++][1] = true;
    } else if (longest[i + 1][j] >= longest[i][j + 1]) i++;
    else j++;
  }
  return marked;
}
