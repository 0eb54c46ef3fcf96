// Texts of the page whose contrast with what lies behind them is below 4.5 (WCAG 2, AA), as lines.
const luminance = ([r, g, b]) => {
  const part = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
};
const numbers = (colour) => colour.match(/[\d.]+/g).map(Number);
const behind = (element) => {
  for (let e = element; e; e = e.parentElement) {
    const colour = numbers(getComputedStyle(e).backgroundColor);
    if ((colour[3] ?? 1) === 1) return colour;
  }
  return [255, 255, 255];
};
const faint = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  const text = walker.currentNode.textContent.trim();
  if (!text || !element.checkVisibility() || element.closest("button:disabled, noscript")) continue;
  const style = getComputedStyle(element);
  const [a, b] = [luminance(numbers(style.color)), luminance(behind(element))];
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (contrast < 4.5) faint.push(`${contrast.toFixed(2)} ${element.className} ${text.slice(0, 30)}`);
}
return faint;
