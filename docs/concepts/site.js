// Code and tables that scroll sideways take the focus, so that a keyboard can scroll them.
addEventListener("load", () => {
  const sizes = new ResizeObserver((seen) => {
    for (const { target: box } of seen) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    }
  });
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .diagram, pre > code")) sizes.observe(box);
});
